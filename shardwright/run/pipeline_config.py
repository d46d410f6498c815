"""Settings of the pipeline."""

import dataclasses

from shardlib.schedules import schedule_of
from shardwright_data.checks import within


@dataclasses.dataclass
class PipelineConfig:
    """Settings of the stages of a mesh with p (docs/pipeline.md). Without p none of them has an effect."""

    schedule: str = "interleaved_1f1b"
    """gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_v, or your own as module:function (shardlib/schedules.py)."""
    virtual_stages: int = within(1, 2**10, 1)
    """Number v of stages on each device of p, at least 1: any number for interleaved_1f1b or your own schedule, 2 for
    zb_v, 1 for the others. The number of layers is a multiple of p·v."""


def check_pipeline(c: PipelineConfig) -> None:
    """Raises ValueError for a setting that is not allowed."""
    try:
        schedule_of(c.schedule)
    except ValueError as error:
        raise ValueError(f"pipeline.schedule: {error}") from error
