"""Array types `f32['B/d M']`, types composed of them, and their shardings and partition specs."""

import collections.abc
import contextlib
import dataclasses
import functools
import types
import typing
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.axes import SPREAD_OVER
from shardlib.describe import SHORT_DTYPES, describe
from shardlib.mesh import devices_along, inside_shard_map, mesh_axes, on_mesh
from shardlib.opaque import Copy, is_opaque, unwrap
from shardlib.parsing import Dim, ShapeSpec, ShardError, parse_shape, sort_axes, spec_text
from shardlib.planned import planned_axes, planned_devices
from shardlib.scopes import current_scope

# ---- types ---------------------------------------------------------------------------------------


class _Type:
    """A type that is not a class; `X | None` works as it does for a class."""

    def __or__(self, other):
        return typing.Union[self, other]  # noqa: UP007 (this is the operator)


@dataclasses.dataclass(frozen=True, repr=False)
class ArrayType(_Type):
    """The type `f32['B/d M']`: the short name of a dtype, and a spec.

    With `spread`, the last dim is also sharded over as many of the axes t and fsdp as the other
    dims lack and as divide it. Each device of the axes `whole` then holds the same.
    """

    dtype: str
    spec: ShapeSpec
    spread: bool = False
    whole: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{self.dtype}['{self.spec}']"

    @property
    def spread_axes(self) -> set[str]:
        """The axes over which `spread` may shard the last dim."""
        return {*SPREAD_OVER}

    def with_dims(self, dims: str) -> typing.Self:
        """The type with leading dims, those of an `Array`."""
        return dataclasses.replace(self, spec=parse_shape(f"{dims} {self.spec}"))

    @property
    def jax_dtype(self) -> jnp.dtype:
        """The dtype of an array of this type, in the current scope."""
        return DType(self.dtype).dtype


_LONG_DTYPES = {short: name for name, short in SHORT_DTYPES.items()}


class DType:
    """The dtype `f32`. Indexing it with a spec returns an array type."""

    def __init__(self, name: str):
        self.name = name

    def __getitem__(self, spec: str | bytes) -> ArrayType:
        parsed = parse_shape(spec)
        if parsed.index is not None or parsed.open:
            raise ShardError(
                f"`{parsed}` is not the type of an array",
                "[dim] and ... belong to the specs of ops",
            )
        return ArrayType(self.name, parsed)

    @property
    def dtype(self) -> jnp.dtype:
        """The jax dtype of this name.

        Raises ShardError for a `dtype_name` that no current scope binds.
        """
        if self.name in _LONG_DTYPES:
            return jnp.dtype(_LONG_DTYPES[self.name])
        if self.name not in current_scope().dtypes:
            raise ShardError(
                f"dtype name {self.name} is not bound to a dtype here",
                f"run under `with Scope({self.name}=…):`",
            )
        return current_scope().dtypes[self.name]

    def __repr__(self) -> str:
        return self.name


f32, f64, f16, bf16 = DType("f32"), DType("f64"), DType("f16"), DType("bf16")
i8, i16, i32, i64 = DType("i8"), DType("i16"), DType("i32"), DType("i64")
u8, u16, u32, u64 = DType("u8"), DType("u16"), DType("u32"), DType("u64")
bool_ = DType("bool_")


def dtype_name(name: str) -> DType:
    """Declares a dtype that each trace chooses.

    After `act = dtype_name('act')`, `act['B/d M']` is a type; `with Scope(act=jnp.bfloat16):`
    chooses its dtype.
    """
    if name in _LONG_DTYPES:
        raise ShardError(f"{name!r} is already a dtype", "choose another name")
    return DType(name)


@dataclasses.dataclass(frozen=True, repr=False)
class Array(_Type):
    """`Array['layers', X]`: the type X with extra leading dims.

    X is an array type or a dataclass of them.
    """

    dims: str
    inner: typing.Any

    def __class_getitem__(cls, args) -> "Array":
        dims, inner = args
        parse_shape(dims)
        return cls(spec_text(dims), inner)

    def __repr__(self) -> str:
        return f"Array['{self.dims}', {self.inner!r}]"


@dataclasses.dataclass(frozen=True)
class Subset(_Type):
    """`Subset[X]`: a dataclass of arrays like X, in which any array may be None.

    `Subset['inputs', X]` has, instead of each array, a Factor with only those dims, or None.
    """

    inner: typing.Any
    dims: str | None = None

    def __class_getitem__(cls, args) -> "Subset":
        dims, inner = args if isinstance(args, tuple) else (None, args)
        if dims is not None and not {*dims.split()} <= {"inputs", "outputs"}:
            raise ShardError(
                f"{dims!r} are not dims of a Factor", "write inputs, outputs, or one of them twice"
            )
        return cls(inner, dims)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Factor:
    """Array with some of the dims of a matrix, such as the means of its rows.

    Its type follows from the matrix's type. A matrix is `stack inputs outputs`, such as
    `layers/p M/fsdp K/t Q D`; the fields `inputs` and `outputs` count its dims on each side. A
    Factor has the stack and the dims that its Subset names, sharded like those of the matrix:

        inputs            layers/p M/fsdp
        outputs           layers/p K/t Q D
        inputs inputs     layers/p M/fsdp by_M/t
        outputs outputs   layers/p K/t Q D by_K_Q_D/fsdp

    A side that is named twice becomes one dim the second time, sharded over the axes of the other
    side.
    """

    array: typing.Any
    inputs: int = dataclasses.field(metadata={"static": True})
    outputs: int = dataclasses.field(metadata={"static": True})


def arranged(
    dims: str,
    whole: tuple,
    inputs: int,
    outputs: int,
    merged: collections.abc.Callable[..., typing.Any],
) -> tuple:
    """Selects from `whole` what a Factor with `dims` has.

    `whole` has an entry for each dim of a matrix. `merged(own, other)` makes the entry of a side
    that is named twice, from the entries of this side and the other.
    """
    ends = len(whole) - outputs
    sides = {"inputs": whole[ends - inputs : ends], "outputs": whole[ends:]}
    found = whole[: ends - inputs]
    named = set()
    for side in dims.split():
        (other,) = sides.keys() - {side}
        found += (merged(sides[side], sides[other]),) if side in named else sides[side]
        named.add(side)
    return found


def factor_type(t: ArrayType, dims: str, inputs: int, outputs: int) -> ArrayType:
    """Type of a Factor with `dims` of a matrix of type `t`."""

    def merged(own: tuple[Dim, ...], other: tuple[Dim, ...]) -> Dim:
        # Ordered so that the matrix and the Factor can be gathered over the same axis, one after
        # the other.
        axes = ()
        left = [dim.axes for dim in other]
        while any(left):
            last = sort_axes(of_dim[-1] for of_dim in left if of_dim)[-1]
            axes = (last, *axes)
            left = [of_dim[:-1] if of_dim[-1:] == (last,) else of_dim for of_dim in left]
        return Dim("_".join(("by", *(dim.name for dim in own))), axes)

    return ArrayType(t.dtype, ShapeSpec(arranged(dims, t.spec.dims, inputs, outputs, merged)))


class Separate(Subset):
    """`Separate[X]`: a dataclass of arrays like X with dims of its own.

    Its M may differ from another M in the call.
    """


class Of:
    """`Of[model.Weights]`: the type `model.Weights`.

    Type checkers accept this as an annotation, but no variable.
    """

    def __class_getitem__(cls, kind) -> typing.Any:
        return kind


@typing.dataclass_transform(field_specifiers=(dataclasses.field,))
def pytree_dataclass(cls=None, **kwargs):
    """Makes a dataclass that is a JAX pytree.

    Fields with `metadata={'static': True}` belong to its structure.
    """
    if cls is None:
        return functools.partial(pytree_dataclass, **kwargs)
    return jax.tree_util.register_dataclass(dataclasses.dataclass(cls, **kwargs))


# ---- walking types -------------------------------------------------------------------------------

ABSENT = object()
"""What `arrays_of` yields for the arrays of an optional part that is None."""


def _class_of(t) -> typing.Any:
    """Returns State for `State[Transformer]`; any other annotation unchanged."""
    return typing.get_origin(t) if dataclasses.is_dataclass(typing.get_origin(t)) else t


@functools.cache
def _fields(t) -> list[tuple[str, typing.Any]]:
    """Name and type of each data field (not static) of a dataclass."""
    cls = _class_of(t)
    hints = typing.get_type_hints(cls)
    chosen = dict(zip(getattr(cls, "__parameters__", ()), typing.get_args(t), strict=False))
    return [
        (f.name, _choose(hints[f.name], chosen))
        for f in dataclasses.fields(cls)
        if not f.metadata.get("static")
    ]


def _choose(t, chosen: dict):
    """Replaces the TypeVars in `t` by the types chosen for them."""
    if isinstance(t, typing.TypeVar):
        return chosen.get(t, t)
    if isinstance(t, Subset | Array):
        return dataclasses.replace(t, inner=_choose(t.inner, chosen))
    variables = getattr(t, "__parameters__", ()) if typing.get_origin(t) else ()
    return t[tuple(chosen.get(v, v) for v in variables)] if variables else t


def _class_for(variable: typing.TypeVar, value, path: str):
    """Binds a TypeVar to the class of `value`, which must be the same throughout a call.

    An absent part has it too.
    """
    known = current_scope().classes.get(variable, type(value))
    found = known if value is ABSENT else type(value)
    if known is not found or not (dataclasses.is_dataclass(found) and is_typed(found)):
        wanted = "a dataclass of arrays" if known is found else known.__name__
        shown = "of no class" if value is ABSENT else f"of class {found.__name__}"
        raise ShardError(
            f"{path or 'value'} is {shown}, where {variable} is {wanted}",
            "give one class in a call",
        )
    current_scope().classes[variable] = found
    return found


def _optional(t):
    """Returns X for `X | None`; None for other types."""
    args = [a for a in typing.get_args(t) if a is not type(None)]
    is_union = typing.get_origin(t) in (typing.Union, types.UnionType)
    return args[0] if is_union and len(args) == 1 else None


def is_typed(t) -> bool:
    """True if the annotation holds array types.

    Raises ShardError if some of them cannot be checked.
    """
    if isinstance(t, ArrayType | Array | Subset | typing.TypeVar):
        return True
    if (inner := _optional(t)) is not None:
        return is_typed(inner)
    if dataclasses.is_dataclass(_class_of(t)):
        return any(is_typed(inner) for _, inner in _fields(t))
    arguments = [a for a in typing.get_args(t) if a is not Ellipsis and not isinstance(a, list)]
    if typing.get_origin(t) is collections.abc.Callable or not any(map(is_typed, arguments)):
        return False
    if typing.get_origin(t) is not tuple and _each(t) is None:
        raise ShardError(
            f"the arrays in {t!r} cannot be checked",
            "annotate with array types, X | None, tuple[X, Y], list[X], dict[str, X], "
            "Array['dims', X] or pytree dataclasses of them",
        )
    return True


def _each(t):
    """Returns X for `list[X]`, `tuple[X, ...]` and `dict[key, X]`, which hold any number of X.

    Returns None for other types.
    """
    origin, args = typing.get_origin(t), typing.get_args(t)
    if origin is dict:
        return args[-1]
    if origin is list or (origin is tuple and ... in args):
        return args[0]
    return None


def _children(t, value, path: str) -> list[tuple[str, typing.Any, typing.Any]]:
    """(path, type, part) of each part of a list, dict, tuple or dataclass.

    They come in the order of its leaves. A value of a subclass has the types that the subclass
    declares. Raises ShardError for a value of another kind.
    """
    if (each := _each(t)) is not None:
        if value is ABSENT:
            return [(f"{path}[...]", each, ABSENT)]
        if not isinstance(value, kind := typing.get_origin(t)):
            raise ShardError(
                f"{path or 'value'} is {describe(value)}, not a {kind.__name__}", "pass one"
            )
        keys = sorted(value) if kind is dict else range(len(value))
        return [(f"{path}[{key!r}]", each, value[key]) for key in keys]
    args = typing.get_args(t) if typing.get_origin(t) is tuple else None
    kind = _class_of(t) if args is None else tuple
    is_other = not isinstance(value, kind) or (args is not None and len(value) != len(args))
    if value is not ABSENT and is_other:
        of_length = f" of {len(args)}" if args else ""
        other = type(value)
        if other is not kind and other.__name__ == kind.__name__:
            modules = f"{other.__module__}, not of {kind.__module__}"
            raise ShardError(
                f"{path or 'value'} is a {kind.__name__} of {modules}",
                "import both from one module",
            )
        raise ShardError(
            f"{path or 'value'} is {describe(value)}, not a {kind.__name__}{of_length}", "pass one"
        )
    if args is None:
        t = t if value is ABSENT or type(value) is kind else type(value)
        return [
            (f"{path}.{name}" if path else name, a, getattr(value, name, ABSENT))
            for name, a in _fields(t)
        ]
    parts = (ABSENT,) * len(args) if value is ABSENT else value
    return [(f"{path}[{i}]", a, part) for i, (a, part) in enumerate(zip(args, parts, strict=True))]


def _stacked(dims: str, t: ArrayType, value: typing.Any) -> ArrayType:
    """The array type with leading dims `dims`, as an array has it on the current mesh."""
    is_scalar = not t.spec.dims
    t = t.with_dims(dims)
    spec = t.spec
    if not t.spread:
        return dataclasses.replace(t, spec=on_mesh(spec))
    added = sort_axes(t.spread_axes - spec.sharded)
    if not is_scalar:
        *others, last = spec.dims
        last = dataclasses.replace(last, axes=sort_axes((*last.axes, *added)), written=())
        spec = dataclasses.replace(spec, dims=(*others, last))
    added = [axis for axis in added if axis in planned_axes()]
    whole = added if is_scalar or not added else _whole_over(spec.dims[-1], added, value)
    return dataclasses.replace(t, spec=on_mesh(spec).without(whole), whole=tuple(whole))


def _whole_over(dim: Dim, added: list[str], value: typing.Any) -> list[str]:
    """Those of the axes `added` of the last dim of an array that do not shard it.

    They do not divide it together with the others, on the mesh of the run also where one device is
    traced. A weight at rest is a copy over these axes, so its type may name them.
    """
    if isinstance(value, Copy):
        value = unwrap(value)
    if not getattr(value, "shape", ()) or is_opaque(value):
        return []

    def left_out(size: int) -> list[str]:
        found = []
        blocks = planned_devices(axis for axis in dim.axes if axis not in added)
        for axis in added:
            fits = size % (blocks * planned_devices([axis])) == 0
            blocks *= planned_devices([axis]) if fits else 1
            found += [] if fits else [axis]
        return found

    if not (isinstance(value, jax.Array) and inside_shard_map()):
        return left_out(value.shape[-1])
    # This device's block. JAX knows over which axes arguments, and what is computed of them, are
    # sharded. What it knows does not fit a constant, which may have any type.
    varying = jax.typeof(value).manual_axis_type.varying
    same = {axis for axis in added if axis in mesh_axes() and axis not in varying}
    size = value.shape[-1] * devices_along(axis for axis in dim.axes if axis not in same)
    found = left_out(size)
    return found if same == {axis for axis in found if axis in mesh_axes()} else []


def arrays_of(
    t, value, path: str = "", *, dims: str = "", only_arrays: bool = False
) -> Iterator[tuple[str, ArrayType, typing.Any]]:
    """(path, array type, array) of each array type in `t`, in the order of a value's leaves.

    The types are as the current mesh has them. The array is ABSENT where `value` has None for an
    optional part, and everywhere if `value` is ABSENT. `path` and the stacked `dims` are those of
    the value itself. Parts without array types are skipped, or raise ShardError with `only_arrays`.

    Raises:
        ShardError: the value does not have the classes and tuples that `t` declares.
    """
    options = {"dims": dims, "only_arrays": only_arrays}
    if isinstance(t, ArrayType):
        yield path, _stacked(dims, t, value), value
    elif isinstance(t, Array):
        yield from arrays_of(t.inner, value, path, dims=f"{dims} {t.dims}", only_arrays=only_arrays)
    elif isinstance(t, Separate):
        for name, array, part in arrays_of(t.inner, value, path, **options):
            own = (dataclasses.replace(dim, name=f"own_{dim.name}") for dim in array.spec.dims)
            yield (
                name,
                dataclasses.replace(array, spec=dataclasses.replace(array.spec, dims=tuple(own))),
                part,
            )
    elif isinstance(t, Subset):
        for name, array, part in arrays_of(t.inner, value, path, **options):
            if t.dims is None or part is None or part is ABSENT:
                yield name, array, ABSENT if part is None else part
            elif isinstance(part, Factor):
                yield (
                    f"{name}.array",
                    factor_type(array, t.dims, part.inputs, part.outputs),
                    part.array,
                )
            else:
                raise ShardError(
                    f"{name} is {describe(part)}, not a Factor",
                    f"make it one, for Subset[{t.dims!r}, …]",
                )
    elif isinstance(t, typing.TypeVar):
        yield from arrays_of(_class_for(t, value, path), value, path, **options)
    elif (
        value is None
        and isinstance(_optional(t), typing.TypeVar)
        and _optional(t) not in current_scope().classes
    ):
        return  # outside of a call nothing says which arrays are absent
    elif _optional(t) is not None:
        yield from arrays_of(_optional(t), ABSENT if value is None else value, path, **options)
    elif is_typed(t):
        for name, inner, part in _children(t, value, path):
            yield from arrays_of(inner, part, name, **options)
    elif only_arrays:
        raise ShardError(
            f"{path} has no array type",
            "annotate it, e.g. f32['B/d M']; what is not data comes from the enclosing function, "
            "or is a field with metadata={'static': True}",
        )


def arrays_in(t, value, path: str = "") -> list[tuple[str, ArrayType, typing.Any]]:
    """`arrays_of` without the arrays that are absent from `value`."""
    return [found for found in arrays_of(t, value, path) if found[2] is not ABSENT]


def map_arrays(fn: collections.abc.Callable[..., typing.Any], x):
    """Replaces each array of `x`, a dataclass of array types, by fn(path, array type, array)."""
    leaves, structure = jax.tree.flatten(x, is_leaf=is_opaque)
    parts = zip(arrays_in(type(x), x), leaves, strict=True)
    return structure.unflatten([fn(path, array, leaf) for (path, array, _), leaf in parts])


# ---- shardings -----------------------------------------------------------------------------------


def placeholders(t):
    """Builds a value of type `t` with an object in place of each array.

    Arrays that may be None are among them.
    """
    if isinstance(t, ArrayType):
        return object()
    if (inner := t.inner if isinstance(t, Array | Subset) else _optional(t)) is not None:
        return placeholders(inner)
    if not is_typed(t):
        remedy = "use f32['…'], Array['…', X], a pytree_dataclass, or tuples of them"
        raise ShardError(f"{t!r} holds no array types", remedy)
    if _each(t) is not None:
        raise ShardError(
            f"{t!r} does not say how many it has",
            "write Array['3', X] for three alike parts, or pass a value of the type as `like`",
        )
    parts = {path: placeholders(inner) for path, inner, _ in _children(t, ABSENT, "")}
    if typing.get_origin(t) is tuple:
        return tuple(parts.values())
    try:
        return _class_of(t)(**parts)
    except TypeError:
        problem = f"{t!r} does not say its static fields"
        raise ShardError(problem, "pass a value of the type as `like`") from None


def partition_spec(t: ArrayType) -> PartitionSpec:
    """The `PartitionSpec` of an array of type `t`. Raises ShardError if it has a + or * mark."""
    if t.spec.partial or t.spec.copies:
        raise ShardError(
            f"{t!r} has a + or * mark: it exists inside shard_map only",
            "reduce a partial sum before it leaves; a copy cannot leave",
        )
    dims = on_mesh(t.spec).dims
    entries = (
        None if not dim.axes else dim.axes[0] if len(dim.axes) == 1 else dim.axes for dim in dims
    )
    return PartitionSpec(*entries)


def make_shardings(t, like=None):
    """The `NamedSharding` of each array of type `t` on the current mesh.

    They are in a pytree structured like a value of the type. `like` is a value of type `t`: the
    result has its static fields, and None where it has None. Without `like` the result has a
    sharding for each array of an optional part, which is a pytree prefix of a value that has None
    there.

    Raises:
        ShardError: a + or * mark, an axis that the mesh lacks, or a field that holds no array type.
    """
    mesh = abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        raise ShardError("no mesh is set", "run this under `with jax.set_mesh(mesh):`")
    with contextlib.suppress(ValueError):  # inside jit JAX knows only the abstract mesh
        devices = jax.sharding.get_mesh()
        # Under an AbstractMesh, this may be the mesh of a run, which traces another program for
        # that one.
        mesh = devices if devices.abstract_mesh == abstract else abstract

    def sharding(array: ArrayType) -> NamedSharding:
        devices_along(sorted(on_mesh(array.spec).sharded))
        return NamedSharding(mesh, partition_spec(array))

    like = placeholders(t) if like is None else like
    shardings = [sharding(array) for _, array, _ in arrays_in(t, like)]
    return jax.tree.unflatten(jax.tree.structure(like), shardings)
