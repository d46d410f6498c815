"""The op per_device, for code that treats devices differently on purpose, and marks around it.

The proof does not check what such code computes: it takes the results to have their declared types.

A mark is a name on a value (jax.ad_checkpoint.checkpoint_name), which compiles to nothing.
Arguments are marked `enters`, and results `leaves` with the declared type. Gradients cross in the
other direction: that of a result enters, and that of an argument leaves with the argument's type.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardlib.equations import Eqn
from shardlib.op_checks import check_operand, checked_op, require_shard_map
from shardlib.parsing import ShapeSpec, ShardError, parse_shape
from shardlib.values import is_opaque, on_mesh, sharded_apart

REGION = "per_device"
"""Name of the jitted function that holds per-device code."""
STAGES = (
    "the stages of a pipeline run different tasks at a time, by a schedule that is checked by "
    "itself"
)
"""The reason that the pipeline executor gives. It is traced without a region around it, so that
code inside it may have regions."""


LOGITS, TARGETS = "logits of the model", "targets of the loss"
"""Names of the logits and of what they are to predict, in a step's loss."""
GIVEN = "given to the loss"
"""Name of what a loss reads besides logits and targets."""
LAYER_NUMBERS = "numbers of the layers"
"""Name of the ids of all layers. A stage uses some of them; the comparison with one device finds
any other numbers in their place."""


def layer_numbers(count: int) -> jax.Array:
    """Returns the ids of all layers, 0 to count - 1."""
    return checkpoint_name(jnp.arange(count), LAYER_NUMBERS)


GRADIENT_SUMS = "gradients of all microbatches"
"""Name of the sums of gradients that are cast to the dtypes of their weights."""


def like_weights(g: Any, w: Any) -> Any:
    """Casts sums of gradients to the dtypes of the gathered weights `w`, as jax.vjp takes them.

    The name GRADIENT_SUMS allows these sums alone to be cast to another dtype in a step that
    gathers its weights ahead than in one that does not: there, gathered weights have no gradients.
    """
    return jax.tree.map(lambda g, x: checkpoint_name(g, GRADIENT_SUMS).astype(x.dtype), g, w)


class Mark(NamedTuple):
    """What the name of a marked value encodes.

    Attributes:
        kind: "enters", "leaves", or "gradient", which leaves with the type of the argument that
            entered as `label`.
        label: the reason; for an argument with its index, as in "a halo [0]".
        spec: the type in shardtypes' notation; empty for any type.
    """

    kind: str
    label: str
    spec: str = ""


def mark_of(eqn: Eqn) -> Mark | None:
    """Returns the mark that an equation makes; None for other equations."""
    name = eqn.params.get("name") if eqn.primitive.name == "name" else None
    if isinstance(name, str) and name.startswith(f"{REGION}|"):
        return Mark(*name.split("|")[1:])
    return None


def is_region(eqn: Eqn) -> bool:
    """Returns True if an equation calls code that is per-device on purpose."""
    return eqn.params.get("name") == REGION and eqn.primitive.name in ("jit", "pjit")


def _name(x: jax.Array, mark: Mark) -> jax.Array:
    return checkpoint_name(x, "|".join((REGION, *mark)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _marked(x: jax.Array, forward: Mark, backward: Mark) -> jax.Array:
    return _name(x, forward)


_marked.defvjp(
    lambda x, forward, backward: (_name(x, forward), None),
    lambda forward, backward, _, g: (_name(g, backward),),
)


def mark(x: jax.Array, forward: Mark, backward: Mark) -> jax.Array:
    """Marks `x` as `forward`, and its gradient as `backward`."""
    return (
        _marked(x, forward, backward) if jnp.issubdtype(x.dtype, jnp.inexact) else _name(x, forward)
    )


def enter(x: jax.Array, label: str, spec: str = "") -> jax.Array:
    """Marks an argument of per-device code, of type `spec` if it is given."""
    return mark(x, Mark("enters", label, spec), Mark("gradient", label))


def leave(x: jax.Array, label: str, spec: str) -> jax.Array:
    """Marks a result of per-device code, of type `spec`."""
    return mark(x, Mark("leaves", label, spec), Mark("enters", label))


def leave_like(x: jax.Array, label: str) -> jax.Array:
    """Marks a gradient that per-device code computes for the argument that entered as `label`."""
    return _name(x, Mark("gradient", label))


def region(fn: Callable[..., Any], *args: object) -> Any:
    """Calls fn(*args) under jit, by a name that tells the proof not to look inside."""

    def per_device(*args):
        return fn(*args)

    return jax.jit(per_device)(*args)


def per_device(spec, fn, *args, reason: str, takes: str = ""):
    """Calls a function that treats devices differently on purpose, such as by their index.

    The proof does not look inside: it takes the results to have the types in the spec, and the
    gradients of the arguments to have the arguments' types. Use it for a ring, a halo, the slots of
    a mixture of experts, or noise that differs by device.

    - sends: what the function sends
    - gradient: that of the function
    - rejects: a result that does not have its type; a reason that is empty or has a `|`

    Args:
        spec: the type of the result, `B/r/d L/t M`; for a tuple, the types separated by commas.
        fn: a function of arrays and pytrees of arrays.
        *args: its arguments.
        reason: why the result is right on every mesh. Give each use its own.
        takes: types of the first arrays in `args`, separated by commas; the proof checks them.

    >>> def flip(block):
    ...     return lax.ppermute(block[::-1], "t", [(0, 1), (1, 0)])
    >>> @typed_shard_map
    ... def flipped(x: i32["L/t"]) -> i32["L/t"]:
    ...     return shardops.per_device("L/t", flip, x, reason="both devices of t swap and flip")
    >>> flipped(jnp.arange(4)).tolist()
    [3, 2, 1, 0]
    """
    with checked_op("per_device", spec):
        require_shard_map()
        shapes, taken = (
            [on_mesh(parse_shape(t)) for t in text.split(",") if t] for text in (spec, takes)
        )
        if not reason or "|" in reason:
            raise ShardError(
                f"the reason is {reason!r}",
                "explain in words why the result is right on every mesh",
            )
    leaves, structure = jax.tree.flatten(args)
    specs = [*map(str, taken), *[""] * len(leaves)]
    entered = [enter(x, f"{reason} [{i}]", specs[i]) for i, x in enumerate(leaves)]
    results = region(lambda leaves: fn(*structure.unflatten(leaves)), entered)
    flat, structure = jax.tree.flatten(results, is_leaf=is_opaque)
    with checked_op("per_device", spec, *flat) as sizes:
        if len(flat) != len(shapes):
            raise ShardError(
                f"the spec has {len(shapes)} types, the function {len(flat)} results",
                "give one for each",
            )
        for i, (shape, x) in enumerate(zip(shapes, flat, strict=True), 1):
            check_operand(i, shape, x, sizes)

    def leave_as(shape: ShapeSpec, x: object) -> Any:
        spec = str(sharded_apart(shape))
        return jax.tree.map(lambda array: leave(array, reason, spec), x)

    return structure.unflatten(map(leave_as, shapes, flat))
