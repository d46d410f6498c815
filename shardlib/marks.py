"""Marks around code that is per-device on purpose. What it computes is not checked; its results are what is declared.

A mark is a name on a value (jax.ad_checkpoint.checkpoint_name), which compiles to nothing. An argument is marked
`enters`, and a result `leaves` with the type that is declared. Gradients cross the other way: that of a result enters,
that of an argument leaves with the type of the argument.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

REGION = "per_device"
"""Name of the jitted function that holds the code."""
STAGES = "the stages of a pipeline run different tasks at a time, by a schedule that is checked by itself"
"""Reason of the pipeline's executor, which is traced without a region, and in which code may have regions."""


class Mark(NamedTuple):
    """What the name of a value says.

    Attributes:
        kind: enters, leaves, or gradient: leaves with the type of the argument that entered as `label`.
        label: the reason, and the number of the argument.
        spec: the type, in shardtypes' notation.
    """

    kind: str
    label: str
    spec: str = ""


def mark_of(eqn: Any) -> Mark | None:
    """The mark that an equation makes; None if it makes none."""
    name = eqn.params.get("name") if eqn.primitive.name == "name" else None
    return Mark(*name.split("|")[1:]) if isinstance(name, str) and name.startswith(f"{REGION}|") else None


def is_region(eqn: Any) -> bool:
    """Whether an equation calls code that is per-device on purpose."""
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
    """`x` with a mark, and a mark on its gradient."""
    return _marked(x, forward, backward) if jnp.issubdtype(x.dtype, jnp.inexact) else _name(x, forward)


def enter(x: jax.Array, label: str) -> jax.Array:
    """An argument of per-device code."""
    return mark(x, Mark("enters", label), Mark("gradient", label))


def leave(x: jax.Array, label: str, spec: str) -> jax.Array:
    """A result of per-device code, of the type `spec`."""
    return mark(x, Mark("leaves", label, spec), Mark("enters", label))


def leave_like(x: jax.Array, label: str) -> jax.Array:
    """A gradient that per-device code computes for the argument that entered as `label`."""
    return _name(x, Mark("gradient", label))


def region(fn: Callable, *args: Any) -> Any:
    """fn(*args), as a call that the analysis does not look into."""

    def per_device(*args):
        return fn(*args)

    return jax.jit(per_device)(*args)
