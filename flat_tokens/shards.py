"""The shares of a dataset that several processes or machines write: shard i of n has every n-th piece of the source."""

import io
import re
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

import flat_tokens

Item = TypeVar("Item")


@dataclass(frozen=True)
class Shard:
    index: int
    count: int

    @staticmethod
    def parse(text: str) -> "Shard":
        """Raises ValueError unless `text` is `i/n` with 0 ≤ i < n."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if not found or int(found[1]) >= int(found[2]):
            raise ValueError(f"shard is {text!r}; it must be i/n with 0 ≤ i < n, for example 0/4.")
        return Shard(int(found[1]), int(found[2]))

    def directory(self, out: str) -> str:
        """Where the shard is written: a dataset of its own, beside the one at `out`."""
        return f"{out.rstrip('/')}.shards/{self.index}-of-{self.count}"

    def share(self, items: list[Item]) -> list[Item]:
        return items[self.index :: self.count]


def write_counts(directory: str, split: str, counts: np.ndarray) -> None:
    """Tells others the tokens and documents of this shard's finished pieces."""
    content = io.BytesIO()
    np.save(content, counts)
    flat_tokens.open_kvstore(directory).write(f"pieces_{split}.npy", content.getvalue()).result()


def read_counts(directory: str, split: str) -> np.ndarray:
    """int64[pieces, 2]: tokens and documents of a shard's finished pieces, as far as it has told."""
    read = flat_tokens.open_kvstore(directory).read(f"pieces_{split}.npy").result()
    return np.load(io.BytesIO(read.value)) if read.state == "value" else np.zeros((0, 2), np.int64)


class Others:
    """What the other shards of a dataset have told of their progress.

    A shard may stop where the pieces before its own next one hold all tokens that the dataset needs. Each knows only
    what the others have told, which is less than they have done: none stops too early.
    """

    def __init__(self, out: str, split: str, shard: Shard):
        self._out, self._split, self._shard = out, split, shard
        self._piece = -1
        self._tokens = 0

    def tokens_before(self, piece: int, own: np.ndarray) -> int:
        """Tokens known to stand before this shard's `piece`, its own given for all pieces before that."""
        if piece != self._piece:
            self._piece = piece
            self._tokens = int(own.sum())
            place = piece * self._shard.count + self._shard.index
            for index in range(self._shard.count):
                if index != self._shard.index:
                    other = Shard(index, self._shard.count)
                    counts = read_counts(other.directory(self._out), self._split)
                    before = -(-(place - index) // self._shard.count)
                    self._tokens += int(counts[: max(before, 0), 0].sum())
        return self._tokens
