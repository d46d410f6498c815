"""Placement of layers on pipeline stages, and the order of the rows of a stack of layers at rest.

Only this module knows that order. Checkpoints have every stack in the order of the layers.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardlib.schedules import Stages


@dataclasses.dataclass(frozen=True, eq=False)
class LayerOrder:
    """Order of the rows of a stack of layers at rest, if it is not that of the layers.

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
        return np.argsort(self.layer_of_row)[-self.layers :]  # padding, -1, is sorted to the front

    @property
    def padding(self) -> np.ndarray:
        """Whether each row is padding."""
        return self.layer_of_row < 0

    def to_rows(self, x: Any, **options: Any) -> Any:
        """x[layers, …] as rows at rest: a NumPy array, or a jax.Array with `options` of its `.at[…].get`."""
        found = np.where(self.padding, len(x), self.layer_of_row)
        if isinstance(x, np.ndarray):
            return np.concatenate([x, np.zeros_like(x[:1])])[found]
        return x.at[jnp.asarray(found)].get(mode="fill", fill_value=0, **options)

    def to_layers(self, x: Any, **options: Any) -> Any:
        """x[rows, …] in the order of the layers, without padding. `x` and `options` are as for `to_rows`."""
        return x[self.row_of_layer] if isinstance(x, np.ndarray) else x.at[self.row_of_layer].get(**options)

    def consecutive(self, rows: slice) -> list[tuple[slice, slice]]:
        """Groups of consecutive layers in `rows`: the layers of each, and its rows counted from the first of `rows`."""
        start, stop, _ = rows.indices(self.rows)
        own = self.layer_of_row[start:stop]
        ends = [i for i in range(1, len(own)) if own[i] != own[i - 1] + 1]
        groups = zip([0, *ends], [*ends, len(own)], strict=True)
        return [(slice(int(own[a]), int(own[a]) + b - a), slice(a, b)) for a, b in groups if own[a] >= 0]


@dataclasses.dataclass(frozen=True)
class LayerPlacement:
    """The layers of each stage, and the rows that hold them at rest.

    At rest, a stack `layers/p` has the rows of device 0 of p, then those of device 1, and so on. The rows of a device
    are those of its chunks in order. The rows of a chunk are its layers, and then padding up to the longest chunk.

    Attributes:
        stages: the stages of each device of p; of one device on a mesh without p.
        counts: number of layers of each of the p·v stages, at least 1 each.
    """

    stages: Stages
    counts: tuple[int, ...]

    @property
    def p(self) -> int:
        """Number of devices along p; 1 on a mesh without p."""
        return len(self.stages)

    @property
    def v(self) -> int:
        """Number of chunks per device."""
        return len(self.stages[0])

    @property
    def chunk_rows(self) -> int:
        """Number of rows of a chunk: the layers of the longest stage."""
        return max(self.counts)

    @property
    def padded(self) -> bool:
        """Whether there are rows of padding."""
        return len(set(self.counts)) > 1

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The layer of each row of each device, i32[p, v·chunk_rows]; -1 for padding."""
        first = np.concatenate([[0], np.cumsum(self.counts)])
        rows = np.full((self.p, self.v, self.chunk_rows), -1, np.int32)
        for stage, count in enumerate(self.counts):
            rows[*self.place_of(stage), :count] = first[stage] + np.arange(count)
        return rows.reshape(self.p, -1)

    def place_of(self, stage: int) -> tuple[int, int]:
        """The device of a stage, and the chunk of that device which it is."""
        return next((device, own.index(stage)) for device, own in enumerate(self.stages) if stage in own)

    @property
    def order(self) -> LayerOrder | None:
        """Order of the rows of a stack at rest; None if it is that of the layers."""
        rows = self.rows.reshape(-1)
        return None if np.array_equal(rows, np.arange(len(rows))) else LayerOrder(rows)


def place_layers(
    layers: int, stages: Stages, counts: Sequence[int] | str | None = None, period: int = 1
) -> LayerPlacement:
    """The placement of `layers` layers on the stages of each device.

    Args:
        layers: number of layers.
        stages: the stages of each device.
        counts: the layers of each stage; None: the same number on all; balanced: numbers that differ by 1 period at
            most.
        period: number of layers after which their pattern repeats. All the numbers must be multiples of it.

    Raises:
        ValueError: the layers cannot be placed so.
    """
    p, v = len(stages), len(stages[0])
    n, given = p * v, counts
    if counts is None:
        counts = [layers // n] * n
    elif counts == "balanced":
        periods = layers // period
        counts = [period * (periods // n + (stage < periods % n)) for stage in range(n)]
    if len(counts) != n or sum(counts) != layers or min(counts) < 1 or any(count % period for count in counts):
        how = "" if given is None else f", with pipeline.layers_per_stage={given if given == 'balanced' else [*given]}"
        multiple = f" and a multiple of {period}, after which the pattern of the layers repeats" * (period > 1)
        raise ValueError(
            f"{layers} layers do not divide into {n} stages (p={p}, virtual_stages={v}){how}. Each stage must have at "
            f"least 1 layer{multiple}. Give pipeline.layers_per_stage, a list of {n} numbers that add up to {layers}, "
            "or balanced; or make p or virtual_stages smaller."
        )
    return LayerPlacement(stages, tuple(int(count) for count in counts))
