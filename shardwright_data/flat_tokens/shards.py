"""The shares of a dataset that several processes or machines write: shard i of n has every n-th piece of the source."""

import re
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Shard:
    """Share `index` of `count`."""

    index: int
    count: int

    @staticmethod
    def parse(text: str) -> "Shard":
        """The shard `i/n`. Raises ValueError unless 0 ≤ i < n ≤ 9999."""
        found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
        if not found or int(found[1]) >= int(found[2]):
            raise ValueError(f"shard is {text!r}; it must be i/n with 0 ≤ i < n ≤ 9999, for example 0/4.")
        return Shard(int(found[1]), int(found[2]))

    def directory(self, out: str) -> str:
        """Directory of the shard: a dataset of its own, beside the one at `out`."""
        return f"{out.rstrip('/')}.shards/{self.index}-of-{self.count}"

    def share(self, items: list[Item]) -> list[Item]:
        """Every count-th item."""
        return items[self.index :: self.count]

    def part(self, count: int | None) -> int | None:
        """This shard's part of a number, such as of max_tokens; None of None."""
        return None if count is None else count // self.count + (self.index < count % self.count)
