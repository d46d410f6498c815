"""Places layers on pipeline stages, and orders the rows of a stack of layers at rest.

Only this module knows that order. Checkpoints store every stack in the order of the layers.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from shardlib.schedules import Stages


@dataclasses.dataclass(frozen=True)
class LayerPlacement:
    """The layers of each stage, and the rows that hold them at rest.

    All stages have the same number of layers. At rest, a stack `layers/p` has the rows of device 0
    of p, then those of device 1, and so on. A device's rows are the layers of its chunks in order.

    Attributes:
        stages: the stages of each device of p; on a mesh without p, those of its one device.
        chunk_rows: number of layers of each stage.
    """

    stages: Stages
    chunk_rows: int

    @property
    def p(self) -> int:
        """Number of devices along p; 1 on a mesh without p."""
        return len(self.stages)

    @property
    def v(self) -> int:
        """Number of chunks per device."""
        return len(self.stages[0])

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The layer of each row of each device, i32[p, v·chunk_rows]."""
        first = np.array(self.stages, np.int32) * self.chunk_rows
        return (first[..., None] + np.arange(self.chunk_rows, dtype=np.int32)).reshape(self.p, -1)

    @property
    def order(self) -> np.ndarray | Any:
        """The layer of each row of a stack at rest, i32.

        None if that is the order of the layers.
        """
        rows = self.rows.reshape(-1)
        return None if np.array_equal(rows, np.arange(len(rows))) else rows


def place_layers(layers: int, stages: Stages, period: int = 1) -> LayerPlacement:
    """Places `layers` layers on the stages of each device.

    Args:
        layers: number of layers.
        stages: the stages of each device.
        period: number of layers after which their pattern repeats. Each stage gets a multiple of
            it.

    Raises:
        ValueError: the layers do not divide into such stages.
    """
    p = len(stages)
    v = len(stages[0])
    if layers % (p * v * period):
        multiple = (
            f", each a multiple of {period}, after which the pattern of the layers repeats"
            * (period > 1)
        )
        raise ValueError(
            f"{layers} layers do not divide into {p * v} equal stages (p={p}, "
            f"virtual_stages={v}){multiple}. Choose another number of layers, or p or "
            f"virtual_stages whose product divides {layers}."
        )
    return LayerPlacement(stages, layers // (p * v))
