"""Where the layers of a model are: which stage has which, and in which order the rows of a stack of layers are at rest.

This is the only place that knows of that order. Checkpoints hold every stack in the order of the layers.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class StackOrder:
    """Order of the rows of a stack of layers at rest, where it is not that of the layers.

    Attributes:
        layer_of_row: i32, the layer of each row; -1 for padding, a row of zeros.
    """

    layer_of_row: np.ndarray

    @property
    def rows(self) -> int:
        """Number of rows, padding included."""
        return len(self.layer_of_row)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.layer_of_row.max()) + 1

    @functools.cached_property
    def row_of_layer(self) -> np.ndarray:
        """The row of each layer."""
        return np.array([int(np.flatnonzero(self.layer_of_row == layer)[0]) for layer in range(self.layers)])

    @property
    def padding(self) -> np.ndarray:
        """Whether each row is padding."""
        return self.layer_of_row < 0

    def to_rows(self, x: Any, **options: Any) -> Any:
        """x[layers, …] as rows at rest: a NumPy array, or a jax.Array with `options` of `.at[…].get`."""
        found = np.where(self.padding, len(x), self.layer_of_row)
        if isinstance(x, np.ndarray):
            return np.concatenate([x, np.zeros_like(x[:1])])[found]
        return x.at[jnp.asarray(found)].get(mode="fill", fill_value=0, **options)

    def to_layers(self, x: Any, **options: Any) -> Any:
        """x[rows, …] in the order of the layers, without padding; `x` and `options` as for `to_rows`."""
        return x[self.row_of_layer] if isinstance(x, np.ndarray) else x.at[self.row_of_layer].get(**options)

    def runs(self, rows: slice) -> list[tuple[slice, slice]]:
        """Each run of rows that are layers in a row: as layers, and as rows counted from the first of `rows`."""
        start, stop, _ = rows.indices(self.rows)
        own = self.layer_of_row[start:stop]
        ends = [i for i in range(1, len(own)) if own[i] != own[i - 1] + 1]
        runs = zip([0, *ends], [*ends, len(own)], strict=True)
        return [(slice(int(own[a]), int(own[a]) + b - a), slice(a, b)) for a, b in runs if own[a] >= 0]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which layers each stage has, and where they lie at rest.

    At rest, the rows of a stack `layers/p` are those of device 0 of p, then those of device 1, …; a device's are those
    of its chunks, one after the other; a chunk's are its layers and, up to the size of the longest, padding.

    Attributes:
        p: devices of the axis; 1 without it.
        v: chunks of a device. Stage s is chunk s // p of device s % p.
        counts: the layers of each of the p·v stages, at least 1 each.
    """

    p: int
    v: int
    counts: tuple[int, ...]

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk: the layers of the longest stage."""
        return max(self.counts)

    @property
    def padded(self) -> bool:
        return len(set(self.counts)) > 1

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """i32[p, v·chunk_rows]: the layer of each row of each device, -1 for padding."""
        first = np.concatenate([[0], np.cumsum(self.counts)])
        rows = np.full((self.p, self.v, self.chunk_rows), -1, np.int32)
        for stage, count in enumerate(self.counts):
            rows[stage % self.p, stage // self.p, :count] = first[stage] + np.arange(count)
        return rows.reshape(self.p, -1)

    @property
    def order(self) -> StackOrder | None:
        """Order of the rows of a stack at rest; None where it is that of the layers."""
        rows = self.rows.reshape(-1)
        return None if np.array_equal(rows, np.arange(len(rows))) else StackOrder(rows)


def place_layers(layers: int, p: int, v: int, counts: Sequence[int] | None = None, period: int = 1) -> Placement:
    """The placement of `layers` on p·v stages: equal parts, or as `counts` says; whole periods of `period` layers each.

    Raises:
        ValueError: they cannot be placed so.
    """
    stages = p * v
    if layers % period:
        raise ValueError(
            f"model.layers is {layers}; the pattern of the model's layers repeats after {period}, so it must be a "
            f"multiple of {period}."
        )
    if counts is None:
        if layers % stages:
            raise ValueError(
                f"{layers} layers do not divide into {stages} stages (p={p}, virtual_stages={v}). Give "
                "pipeline.layers_per_stage, a list with the layers of each stage, or balanced."
            )
        counts = [layers // stages] * stages
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise ValueError(
            f"pipeline.layers_per_stage is {list(counts)}; it must have {stages} numbers (p={p} times virtual_stages="
            f"{v}), each at least 1, that add up to the {layers} layers."
        )
    if uneven := [n for n in counts if n % period]:
        raise ValueError(
            f"a pipeline stage has {uneven[0]} of the {layers} layers (p={p}, virtual_stages={v}); the pattern of the "
            f"model's layers repeats after {period}, and each stage must have whole periods. Give "
            f"pipeline.layers_per_stage multiples of {period}, or make p or virtual_stages smaller."
        )
    return Placement(p, v, tuple(int(n) for n in counts))
