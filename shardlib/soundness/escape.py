"""Code that is per-device on purpose: what each device computes there is not checked, its results are taken as declared."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

_MARK = "shardlib.per_device"


@dataclasses.dataclass(frozen=True)
class Boundary:
    """What the name of a marked value says: it enters per-device code, or leaves it as a block of these axes."""

    reason: str
    reason_only: bool
    axes: tuple[tuple[str, ...], ...] = ()
    partial: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


def boundary_of(eqn: Any) -> Boundary | None:
    """What an equation marks; None if it is not a mark."""
    name = eqn.params.get("name") if eqn.primitive.name == "name" else None
    if not isinstance(name, str) or not name.startswith(_MARK):
        return None
    _, kind, text, reason = name.split("|", 3)
    if kind == "enters":
        return Boundary(reason, True)
    dims, _, marks = text.partition(";")
    words = [word.split("/") for word in dims.split()]
    return Boundary(
        reason, False, tuple(tuple(w[1:]) for w in words), tuple(marks.split()), tuple(w[0] for w in words)
    )


def _mark(x: jax.Array, kind: str, text: str, reason: str) -> jax.Array:
    return checkpoint_name(x, f"{_MARK}|{kind}|{text}|{reason}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def leaves(x: jax.Array, text: str, reason: str) -> jax.Array:
    """`x`, taken for a block of the type that `text` says. Its gradient enters per-device code."""
    return _mark(x, "leaves", text, reason)


leaves.defvjp(
    lambda x, text, reason: (leaves(x, text, reason), None),
    lambda text, reason, _, g: (_mark(g, "enters", "", reason),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def enters(x: jax.Array, text: str, reason: str) -> jax.Array:
    """`x`, about to be used by per-device code. Its gradient leaves that code with the type that `text` says."""
    return _mark(x, "enters", "", reason)


enters.defvjp(
    lambda x, text, reason: (enters(x, text, reason), None),
    lambda text, reason, _, g: (_mark(g, "leaves", text, reason),),
)
