"""For tests of any JAX program: does it compute on each mesh what it computes on one device?"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from shardlib.exact.verdicts import check
from shardlib.parsing import ShardError


def sizes_of(mesh: str) -> dict[str, int]:
    """Devices along each axis of a mesh such as `data=2 model=4`.

    Raises:
        ValueError: it is not of this form.
    """
    if not re.fullmatch(r"[a-z_]\w*=[1-9]\d*(?: [a-z_]\w*=[1-9]\d*)*", mesh):
        raise ValueError(
            f"the mesh is {mesh!r}; give the number of devices along each axis, as in 'd=2 t=2'."
        )
    return {axis: int(size) for axis, size in (word.split("=") for word in mesh.split())}


def assert_sound(
    function: Callable[..., Any], *args: Any, meshes: Iterable[str], **specs: Any
) -> None:
    """Raises unless a function computes on each mesh what it computes on one device.

    It calls shardlib.exact.check. Nothing is compiled, and no devices are needed.

    Args:
        function: what each device computes, with `specs`; without them, a function that calls
            typed_shard_map, or jax.shard_map without its `mesh`.
        *args: its arguments, with global shapes: arrays, jax.ShapeDtypeStruct, and pytrees of them.
        meshes: the devices along each axis, such as `["data=4", "data=2 model=2"]`.
        **specs: in_specs, out_specs and other options of jax.shard_map.

    Raises:
        ShardError: the mesh, and file and line of the first value that is not what one device
            computes.
        ValueError: a mesh is not of this form, or none has several devices.

    >>> x, specs = jnp.ones(8), {"in_specs": P("data"), "out_specs": P()}
    >>> assert_sound(lambda x: lax.psum(x.sum(), "data"), x, meshes=["data=2", "data=4"], **specs)
    >>> assert_sound(lambda x: lax.pmean(x.sum(), "data"), x, meshes=["data=2"], **specs)
    Traceback (most recent call last):
    shardlib.parsing.ShardError: on the mesh data=2: ...: a number that depends on the mesh: 2.0 ...
    """
    __tracebackhide__ = True  # of pytest: a failed test shows its own line and the message
    of = {mesh: sizes_of(mesh) for mesh in meshes}
    if not any(size > 1 for sizes in of.values() for size in sizes.values()):
        problem = f"meshes is {[*of]}, none with several devices, so nothing would be checked"
        raise ValueError(f"{problem}; give one such as 'd=2 t=2'.")
    for mesh, sizes in of.items():
        try:
            # JAX's default depends on its version. With Explicit axes, jax.shard_map wants
            # arguments of its in_specs.
            mesh_types = (AxisType.Auto,) * len(sizes)
            check(
                function,
                *args,
                mesh=AbstractMesh((*sizes.values(),), (*sizes,), axis_types=mesh_types),
                **specs,
            )
        except ShardError as error:
            raise ShardError(f"on the mesh {mesh}: {error}", place="") from None
