"""The shares of a dataset that several processes or machines write: shard i of n has every n-th piece of the source."""

import io
import re
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from shardwright_data import flat_tokens

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


def write_counts(directory: str, split: str, counts: np.ndarray) -> None:
    """Shows the other shards the tokens and documents of this shard's finished pieces, int64[pieces, 2]."""
    content = io.BytesIO()
    np.save(content, counts)
    flat_tokens.open_kvstore(directory).write(f"pieces_{split}.npy", content.getvalue()).result()


def read_counts(directory: str, split: str) -> np.ndarray:
    """int64[pieces, 2]: tokens and documents of a shard's finished pieces, as written last."""
    content = flat_tokens.read_file(flat_tokens.open_kvstore(directory), f"pieces_{split}.npy")
    return np.zeros((0, 2), np.int64) if content is None else np.load(io.BytesIO(content))


class OtherShards:
    """Progress of the other shards of a dataset, as far as they have written it.

    A shard may stop where the pieces before its own next one hold all tokens that the dataset needs. The others have
    done more than they have written of: no shard stops too early.
    """

    def __init__(self, out: str, split: str, shard: Shard):
        self._out, self._split, self._shard = out, split, shard
        self._piece = -1
        self._tokens = 0

    def tokens_before(self, piece: int, own: np.ndarray) -> int:
        """Number of tokens known to precede this shard's `piece`. `own` are those of its earlier pieces."""
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
