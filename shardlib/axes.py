"""The axes of the device mesh: one table. docs/changing.md adds an axis."""

from collections.abc import Mapping

AXES = {
    "p": "pipeline: each device has its own layers",
    "r": "replicas: plain data parallel",
    "d": "data parallel, weights sharded at rest (FSDP)",
    "e": "experts, which are sharded over it; else like d",
    "c": "context: each device has some positions",
    "t": "tensor parallel",
}
"""The axes of a mesh and their purpose, major to minor: neighbours along the last are nearest. A mesh may lack each of
them, which is as if it had one device along it. Specs are read without it there."""
ALWAYS = ("r", "d", "t")
"""Axes that the mesh of a run has even where they are of one device."""
OPTIONAL = tuple(axis for axis in AXES if axis not in ALWAYS)
"""Axes that the mesh of a run lacks where they are of one device."""
AXIS_ORDER = ("r", "t", "c", "d", "e", "p")
"""The order of axes within a dim: `M/t/d`, `V/t/p`. Only t and c have no fixed order: in `L/c/t` a device of t has
positions of its device of c, and in `K/t/c` a device of c has heads of its device of t. A dim keeps the order that it
has (`checks.check_value`)."""
GROUPS = {"b": ("r", "d", "e"), "w": ("c", "d", "e")}
"""Groups of axes, which a spec may name in place of their axes: `B/b` is `B/r/d/e`, and `+b` is `+r +d +e`. The axes of
b shard a batch. Those of w shard weights at rest, and are gathered where a weight is used."""
EITHER_ORDER = ("t", "c")
PIPELINE_AXIS = "p"
CHUNK_AXIS = "chunks"
"""Axis of no run: on a mesh with it, which is for proofs, each device has one chunk of the loss. First within a dim."""


def axes_of_mesh(sizes: Mapping[str, int]) -> dict[str, int]:
    """The axes that the mesh of a run has where it is to have these numbers of devices, in the order of AXES."""
    return {axis: sizes.get(axis, 1) for axis in AXES if axis in ALWAYS or sizes.get(axis, 1) != 1}


def mesh_text(sizes: Mapping[str, int]) -> str:
    """The mesh in words: `r=1 d=4 t=2`."""
    return " ".join(f"{axis}={size}" for axis, size in axes_of_mesh(sizes).items())
