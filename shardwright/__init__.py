"""The trainer around train.py: settings, devices and processes, the run and its files, what models
share, sampling.
"""

from shardlib.axes import register_axes
from shardlib.places import register_library
from shardwright.axes import GROUPS, WITHIN_DIM

register_axes(
    WITHIN_DIM,
    either_order=("t", "c"),
    groups=GROUPS,
    spread_over=(*GROUPS["fsdp"], "t"),
)
register_library(
    "shardwright",
    edited=("shardwright.train", "shardwright.models."),
    helpers=("jax_extra.py", "modeling/weights.py", "modeling/state.py", "sampling/cache.py"),
)
