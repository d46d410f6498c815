"""Settings of the pipeline."""

import dataclasses
from typing import Any

from shardlib.parsing import did_you_mean
from shardlib.schedules import schedule_of
from shardwright_data.checks import within


@dataclasses.dataclass
class PipelineConfig:
    """Settings of the stages of a mesh with p (docs/pipeline.md). Without p none of them has an effect."""

    schedule: str = "interleaved_1f1b"
    """gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_v, or your own as module:function (shardlib/schedules.py)."""
    virtual_stages: int = within(1, 2**10, 1)
    """Number v of stages on each device of p, at least 1: any number for interleaved_1f1b or your own schedule, 2 for
    zb_v, 1 for the others. With layers_per_stage=null the number of layers is a multiple of p·v."""
    layers_per_stage: Any = None
    """Number of layers of each of the p·v stages, as a list. balanced: numbers that differ by 1 at most. Null: the
    same number in all."""
    recompute: bool = False
    """Whether the backward pass of a stage computes its forward pass again from the stage's input. Otherwise the
    forward pass keeps what save_for_backward marks."""


def check_pipeline(c: PipelineConfig) -> None:
    """Raises ValueError for a setting that is not allowed."""
    try:
        schedule_of(c.schedule)
    except ValueError as error:
        raise ValueError(f"pipeline.schedule: {error}") from error
    counts = c.layers_per_stage
    is_list = isinstance(counts, list) and all(type(n) is int and n > 0 for n in counts)
    if not (counts is None or counts == "balanced" or is_list):
        raise ValueError(
            f"pipeline.layers_per_stage is {counts!r}; give a list of the layers of each stage, at least 1 each, "
            f"balanced, or null for the same number in all.{did_you_mean(counts, ['balanced'])}"
        )
