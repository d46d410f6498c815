"""The table of mesh axes. docs/architecture.md explains how to add one."""

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
axis are nearest. A mesh may lack any of them, which is the same as having one device along it:
specs are then read without that axis."""
ALWAYS = ("r", "d", "t")
"""Axes that the mesh of a run has even if they have one device."""
OPTIONAL = tuple(axis for axis in AXES if axis not in ALWAYS)
"""Axes that the mesh of a run leaves out if they have one device."""
AXIS_ORDER = ("r", "t", "c", "d", "e", "p")
"""The order of axes within a dim: `M/t/d`, `V/t/p`. Only t and c may come in either order: in
`L/c/t` each device of t holds part of the positions of its device of c; in `K/t/c` each device of c
holds part of the heads of its device of t. A dim keeps the order that it was given
(`checks.check_value`)."""
GROUPS = {"b": ("r", "d", "e"), "fsdp": ("c", "d", "e")}
"""Groups of axes, which a spec may name instead of their axes: `B/b` is `B/r/d/e`, and `+b` is
`+r +d +e`. The axes of b shard the batch. Those of fsdp shard weights at rest; weights are gathered
over them before use."""
EITHER_ORDER = ("t", "c")
PIPELINE_AXIS = "p"


def axes_of_mesh(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the axes that a run's mesh has, in the order of AXES.

    They are the numbers of devices in the settings.
    """
    return {axis: sizes.get(axis, 1) for axis in AXES if axis in ALWAYS or sizes.get(axis, 1) != 1}


def mesh_text(sizes: Mapping[str, int]) -> str:
    """The mesh as text: `r=1 d=4 t=2`."""
    return " ".join(f"{axis}={size}" for axis, size in axes_of_mesh(sizes).items())
