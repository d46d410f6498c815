"""What is bound while JAX traces a function.

That is sizes of dims, dtypes, the matmul to use, and the axes of a pipeline stage.
"""

import contextlib
import contextvars
import functools
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax.numpy as jnp

from shardlib.parsing import Dim, ShapeSpec

Sizes = dict[str, int]
"""Size of each dim over all devices, by its name."""


class Scope:
    """Bindings of the checks: sizes of dims, classes of TypeVars, dtypes of dtype names.

    Each dim has its size, each TypeVar its class, and each dtype name its dtype. `with Scope():`
    starts without sizes, and forgets at its end what was bound inside. Functions under `typed` and
    `typed_shard_map` open a scope for each call, so calls do not affect each other. Outside any
    scope an op checks its operands only against each other.

    `with Scope(act=jnp.bfloat16):` binds the dtype name `act`. Dtypes, and what `bound` binds, also
    hold in scopes that are opened inside.

    Attributes:
        arguments: the argument types of each typed_shard_map that was traced in it.
        of_weights: axes over which gathered weights vary in JAX's types, although all devices have
            the same.
        sharding_weights: axes that shard gathered weights.
        product: the function that shardops.matmul multiplies with, as set by shardops.products.
        apart: axes over which any value may differ: see values.vary_over.
        alone: axes that the mesh is taken to lack: see values.alone.
    """

    def __init__(self, parent: "Scope | None" = None, **dtypes):
        outer = _SCOPE.get()
        self.sizes: Sizes = dict(parent.sizes) if parent else {}
        # By name, dims over axes of EITHER_ORDER.
        self.orders: dict[str, Dim] = dict(parent.orders) if parent else {}
        self.classes: dict[TypeVar, type] = dict(parent.classes) if parent else {}
        # For messages, by id: a value and its type, those of this scope first.
        self.types: ChainMap[int, tuple[Any, ShapeSpec]] = ChainMap(
            {}, *(outer.types.maps if outer else ())
        )
        self.arguments: list[list[ShapeSpec]] = outer.arguments if outer else []
        self.of_weights: set[str] = outer.of_weights if outer else set()
        self.sharding_weights: set[str] = outer.sharding_weights if outer else set()
        self.product: Callable | None = outer.product if outer else None
        self.apart: frozenset[str] = outer.apart if outer else frozenset()
        self.alone: frozenset[str] = outer.alone if outer else frozenset()
        self.dtypes = {
            **(outer.dtypes if outer else {}),
            **{name: jnp.dtype(dtype) for name, dtype in dtypes.items()},
        }

    def __enter__(self) -> "Scope":
        self._token = _SCOPE.set(self)
        return self

    def __exit__(self, *exc) -> None:
        _SCOPE.reset(self._token)


_SCOPE: contextvars.ContextVar[Scope | None] = contextvars.ContextVar(
    "shardlib_scope", default=None
)


def current_scope() -> Scope:
    """The innermost scope; a new, empty one outside all scopes."""
    return _SCOPE.get() or Scope()


@contextlib.contextmanager
def bound(**values: object) -> Iterator[None]:
    """Context that sets attributes of the current scope, also for scopes opened inside."""
    with contextlib.nullcontext(_SCOPE.get()) if _SCOPE.get() else Scope() as scope:
        before = {name: getattr(scope, name) for name in values}
        vars(scope).update(values)
        try:
            yield
        finally:
            vars(scope).update(before)


def scope(fn):
    """Decorator that gives each call of `fn` its own `Scope`."""

    @functools.wraps(fn)
    def scoped(*args, **kwargs):
        with Scope():
            return fn(*args, **kwargs)

    return scoped
