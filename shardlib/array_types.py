"""Array types `f32['B/d M']`, compounds of them, and the shardings and partition specs that they stand for."""

import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.checks import current_scope
from shardlib.parsing import ShapeSpec, ShardError, parse_shape
from shardlib.values import SHORT_DTYPES, axes_product, describe, on_mesh, spec_placement

# ---- types ------------------------------------------------------------------------------------------------------


class ArrayType(type):
    """The class of `f32['B/d M']`: `dtype` (short name) and `spec`. A class, so that `X | None` and `tuple[X]` work."""

    dtype: str
    spec: ShapeSpec

    def __repr__(cls) -> str:
        return f"{cls.dtype}['{cls.spec}']"


@functools.lru_cache(maxsize=4096)
def _array_type(dtype: str, spec: ShapeSpec) -> ArrayType:
    return ArrayType(f"{dtype}[{spec}]", (), {"dtype": dtype, "spec": spec})


_LONG_DTYPES = {short: name for name, short in SHORT_DTYPES.items()}


class DType:
    """`f32`: indexed with a spec string, gives an array type."""

    def __init__(self, name: str):
        self.name = name

    def __getitem__(self, spec: str | bytes) -> ArrayType:
        parsed = parse_shape(spec)
        if parsed.index is not None or parsed.open:
            raise ShardError(f"`{parsed}` is not the type of an array", "[dim] and ... belong to the specs of ops")
        return _array_type(self.name, parsed)

    @property
    def dtype(self):
        """The dtype it stands for. Raises ShardError for a `dtype_name` that the scopes in force do not bind."""
        if self.name in _LONG_DTYPES:
            return jnp.dtype(_LONG_DTYPES[self.name])
        bound = current_scope().dtypes.get(self.name) if current_scope() else None
        if bound is None:
            raise ShardError(
                f"dtype name {self.name} stands for no dtype here", f"run under `with Scope({self.name}=…):`"
            )
        return bound

    def __repr__(self) -> str:
        return self.name


f32, f64, f16, bf16 = DType("f32"), DType("f64"), DType("f16"), DType("bf16")
i8, i16, i32, i64 = DType("i8"), DType("i16"), DType("i32"), DType("i64")
u8, u16, u32, u64 = DType("u8"), DType("u16"), DType("u32"), DType("u64")
bool_ = DType("bool_")


def dtype_name(name: str) -> DType:
    """A dtype that each trace chooses: `act = dtype_name('act')`, `act['B/d M']`, `with Scope(act=jnp.bfloat16):`."""
    if name in SHORT_DTYPES.values():
        raise ShardError(f"{name!r} is a dtype already", "choose another name")
    return DType(name)


class StackedType(type):
    """The class of `Array['layers', Layer]`: each array in Layer with `dims` put before its own."""

    dims: str
    inner: type

    def __repr__(cls) -> str:
        return f"Array['{cls.dims}', {cls.inner!r}]"


class Array:
    """`Array['layers', X]`: the type X (an array type or a dataclass of them) with one more leading dim, or several."""

    @classmethod
    def __class_getitem__(cls, args) -> StackedType:
        dims, inner = args
        dims = dims.decode("ascii") if isinstance(dims, bytes) else dims
        parse_shape(dims)
        return _stacked_type(dims, inner)


@functools.lru_cache(maxsize=4096)
def _stacked_type(dims: str, inner: type) -> StackedType:
    return StackedType(f"Array[{dims}]", (), {"dims": dims, "inner": inner})


class SubsetType(type):
    """The class of `Subset[Weights]`: the type `inner`, any of whose arrays may be None."""

    inner: typing.Any

    def __repr__(cls) -> str:
        return f"Subset[{cls.inner!r}]"


class Subset:
    """`Subset[X]`: a dataclass of arrays like X in which any array may be None instead."""

    @classmethod
    def __class_getitem__(cls, inner) -> SubsetType:
        return _subset_type(inner)


@functools.lru_cache(maxsize=4096)
def _subset_type(inner) -> SubsetType:
    return SubsetType("Subset", (), {"inner": inner})


def pytree_dataclass(cls=None, **kwargs):
    """A dataclass that is a JAX pytree. Fields with `metadata={'static': True}` are part of its structure, not data."""
    if cls is None:
        return functools.partial(pytree_dataclass, **kwargs)
    return jax.tree_util.register_dataclass(dataclasses.dataclass(cls, **kwargs))


# ---- walking types ----------------------------------------------------------------------------------------------

ABSENT = object()
"""Stands in `arrays_of` for the arrays of an optional part that is None."""


def _class_of(t):
    """State of `State[Transformer]`; any other annotation as it is."""
    return typing.get_origin(t) if dataclasses.is_dataclass(typing.get_origin(t)) else t


def _fields(t) -> list[tuple[str, typing.Any]]:
    cls = _class_of(t)
    hints = typing.get_type_hints(cls)
    chosen = dict(zip(getattr(cls, "__parameters__", ()), typing.get_args(t), strict=False))
    return [(f.name, _choose(hints[f.name], chosen)) for f in dataclasses.fields(cls) if not f.metadata.get("static")]


def _choose(t, chosen: dict):
    """`t` with the types chosen for its TypeVars."""
    if isinstance(t, typing.TypeVar):
        return chosen.get(t, t)
    if isinstance(t, SubsetType):
        return _subset_type(_choose(t.inner, chosen))
    if isinstance(t, StackedType):
        return _stacked_type(t.dims, _choose(t.inner, chosen))
    variables = getattr(t, "__parameters__", ()) if typing.get_origin(t) else ()
    return t[tuple(chosen.get(v, v) for v in variables)] if variables else t


def _stands_for(variable: typing.TypeVar, value, path: str):
    """The class that a TypeVar stands for: that of the value, the same throughout a call."""
    if value is ABSENT:
        raise ShardError(f"{path or 'value'}: {variable} stands for no class here", "choose one: State[Transformer]")
    found = type(value)
    if not (dataclasses.is_dataclass(found) and is_typed(found)):
        raise ShardError(
            f"{path or 'value'} is {describe(value)}, where {variable} stands for a dataclass of arrays", "pass one"
        )
    scope = current_scope()
    known = scope.classes.setdefault(variable, found) if scope else found
    if known is not found:
        raise ShardError(
            f"{path or 'value'} is a {found.__name__}, but {variable} is {known.__name__} in this call",
            f"pass a {known.__name__}",
        )
    return found


def _optional(t):
    """X of `X | None`, else None."""
    if typing.get_origin(t) in (typing.Union, types.UnionType):
        args = [a for a in typing.get_args(t) if a is not type(None)]
        if len(args) == 1:
            return args[0]
    return None


def is_typed(t) -> bool:
    """Whether the annotation holds array types: only those are checked. Raises ShardError if they are out of reach."""
    if isinstance(t, ArrayType | StackedType | SubsetType | typing.TypeVar):
        return True
    if _optional(t) is not None:
        return is_typed(_optional(t))
    if _class_of(t) is not t:
        return any(is_typed(inner) for _, inner in _fields(t))
    parts = [is_typed(a) for a in typing.get_args(t) if a is not Ellipsis and not isinstance(a, list)]
    if any(parts) and typing.get_origin(t) is not collections.abc.Callable:
        if typing.get_origin(t) is not tuple or Ellipsis in typing.get_args(t):
            raise ShardError(
                f"the arrays in {t!r} cannot be checked",
                "annotate with array types, X | None, tuple[X, Y], Array['dims', X] or pytree dataclasses of them",
            )
        return True
    return dataclasses.is_dataclass(t) and any(is_typed(inner) for _, inner in _fields(t))


def _restack(t, dims: str):
    """`t` with `dims` before the dims of each of its arrays."""
    if isinstance(t, ArrayType):
        return _array_type(t.dtype, parse_shape(f"{dims} {t.spec}"))
    return _stacked_type(dims, t)


def _children(t, value, path: str):
    """The parts of a compound type beside those of the value: (path, type, part). Checks that they match in kind."""
    if isinstance(t, StackedType):
        return [(name, _restack(inner, t.dims), part) for name, inner, part in _children(t.inner, value, path)]
    if typing.get_origin(t) is tuple:
        args = typing.get_args(t)
        if value is ABSENT:
            value = (ABSENT,) * len(args)
        if not isinstance(value, tuple) or len(value) != len(args):
            found = f"{len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
            raise ShardError(f"{path or 'value'}: {t} wants a tuple of {len(args)}, not {found}", "give one part each")
        return [(f"{path}[{i}]", a, v) for i, (a, v) in enumerate(zip(args, value, strict=True))]
    cls = _class_of(t)
    if value is not ABSENT and not isinstance(value, cls):
        raise ShardError(f"{path or 'value'} is {describe(value)}, not a {cls.__name__}", f"pass a {cls.__name__}")
    return [(f"{path}.{name}" if path else name, inner, getattr(value, name, ABSENT)) for name, inner in _fields(t)]


def arrays_of(t, value, path: str = "") -> Iterator[tuple[str, ArrayType, typing.Any]]:
    """(path, array type, array) for each array type in `t`, in the order of a value's leaves.

    The array is ABSENT where `value` has None for an optional part, and everywhere if `value` is ABSENT itself.
    """
    stacked = isinstance(t, StackedType)
    if isinstance(t, typing.TypeVar):
        yield from arrays_of(_stands_for(t, value, path), value, path)
    elif isinstance(t, SubsetType):
        for name, array, part in arrays_of(t.inner, value, path):
            yield name, array, ABSENT if part is None else part
    elif isinstance(t, ArrayType):
        yield path, _array_type(t.dtype, on_mesh(t.spec)), value
    elif _optional(t.inner if stacked else t) is not None:
        inner = _restack(_optional(t.inner), t.dims) if stacked else _optional(t)
        yield from arrays_of(inner, ABSENT if value is None else value, path)
    elif stacked and isinstance(t.inner, ArrayType):
        yield from arrays_of(_restack(t.inner, t.dims), value, path)
    elif stacked and isinstance(t.inner, StackedType):
        yield from arrays_of(_stacked_type(f"{t.dims} {t.inner.dims}", t.inner.inner), value, path)
    elif is_typed(t):
        for name, inner, part in _children(t, value, path):
            yield from arrays_of(inner, part, name)


def check_boundary(t) -> None:
    """Raises ShardError unless all data in a value of type `t` is arrays that can cross the edge of shard_map."""
    for _, array, _ in arrays_of(t, ABSENT):
        partition_spec(array)
    inner = _optional(t) or (t.inner if isinstance(t, StackedType | SubsetType) else t)
    if inner is not t:
        check_boundary(inner)
    elif not isinstance(t, ArrayType):
        for path, part, _ in _children(t, ABSENT, ""):
            if not is_typed(part):
                owner = getattr(t, "__name__", t)
                raise ShardError(
                    f"{path} of {owner} has no array type",
                    "annotate it, e.g. f32['B/d M']; if it is no data, make it a field with metadata={'static': True}",
                )
            check_boundary(part)


# ---- shardings --------------------------------------------------------------------------------------------------


def _map_type(t, leaf, dims: str = ""):
    """A pytree shaped as a value of type `t`, with `leaf(array_type)` for each array (a prefix at optional parts)."""
    if isinstance(t, ArrayType):
        return leaf(_restack(t, dims))
    if isinstance(t, SubsetType):
        return _map_type(t.inner, leaf, dims)
    if isinstance(t, StackedType):
        return _map_type(t.inner, leaf, f"{dims} {t.dims}".strip())
    if _optional(t) is not None:
        return _map_type(_optional(t), leaf, dims)
    if typing.get_origin(t) is tuple:
        return tuple(_map_type(a, leaf, dims) for a in typing.get_args(t))
    cls = _class_of(t)
    if dataclasses.is_dataclass(cls):
        for f in dataclasses.fields(cls):
            if f.metadata.get("static") and f.default is f.default_factory is dataclasses.MISSING:
                raise ShardError(
                    f"{cls.__name__}.{f.name} is static and has no default", "pass a value of the type as `like`"
                )
        return cls(**{name: _map_type(inner, leaf, dims) for name, inner in _fields(t)})
    raise ShardError(
        f"{t!r} holds no array types", "use f32['…'], Array['…', X], a pytree_dataclass, or tuples of them"
    )


def _map_like(t, leaf, like):
    """A pytree shaped as `like`, a value of type `t`; as any value of it, if `like` is None."""
    if like is None:
        return _map_type(t, leaf)
    leaves = [leaf(array) for _, array, part in arrays_of(t, like) if part is not ABSENT]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def partition_spec(t: ArrayType) -> PartitionSpec:
    """The `PartitionSpec` of an array of type `t`. Raises ShardError if it has a + or * mark."""
    if t.spec.partial or t.spec.copies:
        raise ShardError(
            f"{t!r} has a + or * mark: it exists inside shard_map only",
            "reduce a partial sum before it leaves; a copy cannot leave",
        )
    dims = on_mesh(t.spec).dims
    entries = (None if not dim.axes else dim.axes[0] if len(dim.axes) == 1 else dim.axes for dim in dims)
    return PartitionSpec(*entries)


def make_partition_specs(t, like=None):
    """The `jax.sharding.PartitionSpec` of each array of type `t`, in a pytree shaped like a value of it.

    `like`: a value of type `t`; where it has None for an optional field, so has the result, and static fields are its.
    Without it an optional field gives X's specs, which are a pytree prefix where the value has None.
    Raises ShardError for a + or * mark and for a field that holds no array type.
    """
    return _map_like(t, partition_spec, like)


def make_shardings(t, like=None):
    """The `NamedSharding` of each array of type `t` on the mesh set with `jax.set_mesh`, in a pytree shaped like it.

    `like`: as for `make_partition_specs`. Raises ShardError as that does, and for an axis that the mesh does not have.
    """
    mesh = _current_mesh()

    def sharding(array: ArrayType) -> NamedSharding:
        axes_product(sorted(on_mesh(array.spec).sharded))
        return NamedSharding(mesh, partition_spec(array))

    return _map_like(t, sharding, like)


def _current_mesh():
    """The mesh with its devices where one is set, else (inside jit, or under an AbstractMesh) the abstract one."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        raise ShardError("no mesh is set", "run this under `with jax.set_mesh(mesh):`")
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # JAX's answer inside jit, where only the abstract mesh is known
        return abstract
    return abstract if mesh.empty else mesh


def is_fully_sharded(t) -> bool:
    """Whether each array of type `t` (or PartitionSpec `t`) is sharded over all of d, t and p that the mesh has.

    Then no two devices that differ on those axes hold the same entry, and a sum over devices counts each once.
    Raises ShardError if no mesh is set or `t` holds no array types.
    """
    wanted = {axis for axis in _current_mesh().axis_names if axis in ("d", "t", "p")}
    if isinstance(t, PartitionSpec):
        return wanted <= {axis for axes in spec_placement(t, len(t)) for axis in axes}
    found = [wanted <= array.spec.sharded for _, array, _ in arrays_of(t, ABSENT)]
    if not found:
        raise ShardError(f"{t!r} holds no array types", "pass an array type, or a dataclass or tuple of them")
    return all(found)
