"""The axes of a run's mesh. docs/architecture.md explains how to add one."""

from collections.abc import Mapping

AXES = {
    "p": "pipeline: each device has its own layers",
    "r": "replicas: plain data parallel",
    "d": "data parallel, weights sharded at rest (FSDP)",
    "e": "experts, which are sharded over it; else like d",
    "c": "context: each device has some positions",
    "t": "tensor parallel",
}
"""The axes of a mesh and their purpose, major to minor: devices next to each other along the last
axis are nearest."""
ALWAYS = ("r", "d", "t")
"""Axes that the mesh of a run has even if they have one device."""
OPTIONAL = tuple(axis for axis in AXES if axis not in ALWAYS)
"""Axes that the mesh of a run leaves out if they have one device."""
WITHIN_DIM = ("r", "t", "c", "d", "e", "p")
"""Their order within a dim of a spec. Only t and c may come in either order."""
GROUPS = {"b": ("r", "d", "e"), "fsdp": ("c", "d", "e")}
"""The axes of b shard the batch. Those of fsdp shard weights at rest; weights are gathered over
them before use."""


def axes_of_mesh(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the axes that a run's mesh has, in the order of AXES.

    They are the numbers of devices in the settings.
    """
    return {axis: sizes.get(axis, 1) for axis in AXES if axis in ALWAYS or sizes.get(axis, 1) != 1}


def mesh_text(sizes: Mapping[str, int]) -> str:
    """The mesh as text: `r=1 d=4 t=2`."""
    return " ".join(f"{axis}={size}" for axis, size in axes_of_mesh(sizes).items())
