"""Sharding types: `f32['M/d F/t']` on dataclass fields, arguments, results and annotated locals, checked as JAX traces.

    @pytree_dataclass
    class Layer:
        w_up: f32['M/d F/t']                     # at rest: M in blocks over d, F in blocks over t

    @typed_shard_map
    def forward(x: f32['B/d M'], w: Layer) -> f32['B/d F/t']:
        w_up: f32['M F/t'] = shardops.all_gather('M/d F/t -> M F/t', w.w_up)
        return shardops.einsum_unreduced('B/d M, M F/t -> B/d F/t', x, w_up)

The grammar of the specs is in `parsing`, what each mark means in docs/sharding-types.md. A spec may be `str` or
`bytes`. `dtype_name('act')` makes a dtype that is bound per trace: `with Scope(act=jnp.bfloat16):`.
"""

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardlib.checks import (
    SHORT_DTYPES,
    Bindings,
    Copy,
    Partial,
    Scope,
    axes_product,
    check_sizes,
    check_value,
    current_scope,
    describe,
    mesh_axes,
    outside_placement,
    scope,
    spec_placement,
    without_trivial,
)
from shardlib.parsing import ShapeSpec, ShardError, parse_shape

__all__ = [
    "Array",
    "Copy",
    "Partial",
    "Scope",
    "ShardError",
    "bf16",
    "bool_",
    "dtype_name",
    "f16",
    "f32",
    "f64",
    "i8",
    "i16",
    "i32",
    "i64",
    "is_fully_sharded",
    "make_partition_specs",
    "make_shardings",
    "pytree_dataclass",
    "register_with_typeguard",
    "scope",
    "typed",
    "typed_shard_map",
    "u8",
    "u16",
    "u32",
    "u64",
]

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


class _DType:
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


f32, f64, f16, bf16 = _DType("f32"), _DType("f64"), _DType("f16"), _DType("bf16")
i8, i16, i32, i64 = _DType("i8"), _DType("i16"), _DType("i32"), _DType("i64")
u8, u16, u32, u64 = _DType("u8"), _DType("u16"), _DType("u32"), _DType("u64")
bool_ = _DType("bool_")


def dtype_name(name: str) -> _DType:
    """A dtype that each trace chooses: `act = dtype_name('act')`, `act['B/d M']`, `with Scope(act=jnp.bfloat16):`."""
    if name in SHORT_DTYPES.values():
        raise ShardError(f"{name!r} is a dtype already", "choose another name")
    return _DType(name)


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


def pytree_dataclass(cls=None, **kwargs):
    """A dataclass that is a JAX pytree. Fields with `metadata={'static': True}` are part of its structure, not data."""
    if cls is None:
        return functools.partial(pytree_dataclass, **kwargs)
    return jax.tree_util.register_dataclass(dataclasses.dataclass(cls, **kwargs))


# ---- walking types ----------------------------------------------------------------------------------------------


def _fields(cls) -> list[tuple[str, typing.Any]]:
    hints = typing.get_type_hints(cls)
    return [(f.name, hints[f.name]) for f in dataclasses.fields(cls) if not f.metadata.get("static")]


def _optional(t):
    """X of `X | None`, else None."""
    if typing.get_origin(t) in (typing.Union, types.UnionType):
        args = [a for a in typing.get_args(t) if a is not type(None)]
        if len(args) == 1:
            return args[0]
    return None


def _is_typed(t) -> bool:
    """Whether the annotation holds array types: only those are checked."""
    if isinstance(t, ArrayType | StackedType):
        return True
    if typing.get_origin(t) is tuple:
        return any(map(_is_typed, typing.get_args(t)))
    if _optional(t) is not None:
        return _is_typed(_optional(t))
    return dataclasses.is_dataclass(t) and any(_is_typed(inner) for _, inner in _fields(t))


def _restack(t, dims: str):
    """`t` with `dims` before the dims of each of its arrays."""
    if not dims:
        return t
    if isinstance(t, ArrayType):
        return _array_type(t.dtype, parse_shape(f"{dims} {t.spec}"))
    return _stacked_type(dims, t)


def _children(t, value, path: str):
    """The parts of a compound type beside those of the value: (name, type, part). Checks that they match in kind."""
    if isinstance(t, StackedType):
        if isinstance(t.inner, StackedType):
            return [(path, _stacked_type(f"{t.dims} {t.inner.dims}", t.inner.inner), value)]
        if isinstance(t.inner, ArrayType):
            return [(path, _restack(t.inner, t.dims), value)]
        return [(name, _restack(inner, t.dims), part) for name, inner, part in _children(t.inner, value, path)]
    if typing.get_origin(t) is tuple:
        args = typing.get_args(t)
        if not isinstance(value, tuple) or len(value) != len(args):
            found = f"{len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
            raise ShardError(
                f"{path or 'value'}: {t} wants a tuple of {len(args)}, not {found}", "return one part each"
            )
        return [(f"{path}[{i}]", a, v) for i, (a, v) in enumerate(zip(args, value, strict=True))]
    if not isinstance(value, t):
        raise ShardError(f"{path or 'value'} is {describe(value)}, not a {t.__name__}", f"pass a {t.__name__}")
    return [(f"{path}.{name}" if path else name, inner, getattr(value, name)) for name, inner in _fields(t)]


def _walk(t, value, path: str, visit) -> None:
    """Calls `visit(path, array_type, array)` for each array type in `t`."""
    if isinstance(t, ArrayType):
        visit(path, t, value)
    elif _optional(t) is not None:
        if value is not None:
            _walk(_optional(t), value, path, visit)
    elif isinstance(t, StackedType) and _optional(t.inner) is not None:
        if value is not None:
            _walk(_restack(_optional(t.inner), t.dims), value, path, visit)
    elif _is_typed(t):
        for name, inner, part in _children(t, value, path):
            _walk(inner, part, name, visit)


def _map_type(t, leaf, dims: str = ""):
    """A pytree shaped as a value of type `t`, with `leaf(array_type)` for each array (a prefix at optional parts)."""
    if isinstance(t, ArrayType):
        return leaf(_restack(t, dims))
    if isinstance(t, StackedType):
        return _map_type(t.inner, leaf, f"{dims} {t.dims}".strip())
    if _optional(t) is not None:
        return _map_type(_optional(t), leaf, dims)
    if typing.get_origin(t) is tuple:
        return tuple(_map_type(a, leaf, dims) for a in typing.get_args(t))
    if dataclasses.is_dataclass(t):
        return t(**{name: _map_type(inner, leaf, dims) for name, inner in _fields(t)})
    raise ShardError(
        f"{t!r} holds no array types", "use f32['…'], Array['…', X], a pytree_dataclass, or tuples of them"
    )


def _partition_spec(t: ArrayType) -> PartitionSpec:
    if t.spec.partial or t.spec.copies:
        raise ShardError(
            f"{t!r} has a + or * mark: it exists inside shard_map only",
            "reduce a partial sum before it leaves; a copy cannot leave",
        )
    return PartitionSpec(*(dim.axes if len(dim.axes) != 1 else dim.axes[0] for dim in t.spec.dims))


def make_partition_specs(t):
    """The `jax.sharding.PartitionSpec` of each array of type `t`, in a pytree shaped like a value of it.

    An optional field (`X | None`) gives X's specs, which stand as a pytree prefix where the value has None.
    """
    return _map_type(t, lambda array: _strip(_partition_spec(array)))


def _strip(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(entry if entry != () else None for entry in spec))


def make_shardings(t, like=None):
    """The `NamedSharding` of each array of type `t` on the mesh set with `jax.set_mesh`, in a pytree shaped like it.

    `like`: a value of type `t`; where it has None for an optional field, so has the result.
    Raises ShardError for an axis that the mesh does not have.
    """
    mesh = _current_mesh()

    def sharding(array: ArrayType) -> NamedSharding:
        axes_product(sorted(array.spec.sharded))
        return NamedSharding(mesh, _strip(_partition_spec(array)))

    if like is None:
        return _map_type(t, sharding)
    leaves = []
    _walk(t, like, "", lambda path, array, value: leaves.append(sharding(array)))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


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
    """
    wanted = {axis for axis in mesh_axes() if axis in ("d", "t", "p")}
    if isinstance(t, PartitionSpec):
        return wanted <= {axis for axes in spec_placement(t, len(t)) for axis in axes}
    found = []
    _map_type(t, lambda array: found.append(wanted <= array.spec.sharded) or _strip(_partition_spec(array)))
    return all(found)


# ---- checking annotated functions -------------------------------------------------------------------------------


def _check_dtype(t: ArrayType, value) -> None:
    if not hasattr(value, "dtype"):
        raise ShardError(f"a {type(value).__name__} is no array", "pass an array")
    found, wanted = (SHORT_DTYPES.get(dtype.name, dtype.name) for dtype in (value.dtype, _DType(t.dtype).dtype))
    if found != wanted:
        bound_by = f" ({t.dtype} here)" if wanted != t.dtype else ""
        raise ShardError(
            f"dtype mismatch: {found}, where {wanted}{bound_by} is declared", f"cast with .astype, or declare {found}"
        )


def _check(t, value, where: str):
    """Checks `value` against the annotation `t` and returns it."""

    def visit(path: str, array: ArrayType, part) -> None:
        bindings = Bindings()
        try:
            check_value(array.spec, part, bindings)
            _check_dtype(array, part)
        except ShardError as error:
            name = f"{where}: {path}" if path else where
            context = f"  value: {describe(part)}\n{bindings.context()}"
            raise ShardError(f"{name}: {array!r}: {error.problem}", error.remedy, context) from None
        bindings.commit()

    try:
        _walk(t, value, "", visit)
    except ShardError as error:
        if error.context:
            raise
        raise ShardError(f"{where}: {error.problem}", error.remedy, Bindings().context()) from None
    return value


class _CheckLocals(ast.NodeTransformer):
    """`x: T = v` becomes `x: T = __check_local__(T, v, 'x')`, in nested functions too."""

    def visit_AnnAssign(self, node: ast.AnnAssign):
        self.generic_visit(node)
        if node.value is not None and isinstance(node.target, ast.Name):
            call = ast.Call(
                func=ast.Name("__check_local__", ast.Load()),
                args=[node.annotation, node.value, ast.Constant(node.target.id)],
                keywords=[],
            )
            node.value = ast.copy_location(call, node.value)
        return node


def _with_checked_locals(fn):
    """`fn` recompiled with a check at each annotated assignment; `fn` itself if its source is not to be had."""
    try:
        lines, first_line = inspect.getsourcelines(fn)
    except (OSError, TypeError):
        return fn
    tree = ast.parse(textwrap.dedent("".join(lines)))
    node = tree.body[0]
    if not isinstance(node, ast.FunctionDef) or not any(isinstance(n, ast.AnnAssign) for n in ast.walk(node)):
        return fn
    node = _CheckLocals().visit(node)
    # Only the code object is taken from the compiled tree: decorators, defaults and annotations stay those of `fn`.
    node.decorator_list, node.returns = [], None
    for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        arg.annotation = None
    node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
    node.args.kw_defaults = [d and ast.Constant(None) for d in node.args.kw_defaults]
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    cells["__check_local__"] = types.CellType(
        lambda t, value, name: _check(t, value, f"{fn.__name__}, local {name}") if _is_typed(t) else value
    )
    outer = ast.FunctionDef(
        name="__outer__",
        args=ast.arguments([], [ast.arg(name) for name in cells], None, [], [], None, []),
        body=[node],
        decorator_list=[],
        type_params=[],
    )
    module = ast.increment_lineno(ast.fix_missing_locations(ast.Module([outer], [])), first_line - 1)
    code = compile(module, fn.__code__.co_filename, "exec")
    for name in ("__outer__", fn.__name__):
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
    closure = tuple(cells[name] for name in code.co_freevars)
    new = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, closure)
    new.__kwdefaults__ = fn.__kwdefaults__
    return functools.update_wrapper(new, fn)


def typed(fn):
    """Decorator: checks array types on arguments, result and annotated assignments at each call, while JAX traces.

    Each call has a `Scope` of its own, so dims of different functions are unrelated; a function defined inside a typed
    one starts from the sizes bound there. Annotations of other types are not looked at. Raises ShardError.
    """
    annotations = {k: t for k, t in inspect.get_annotations(fn, eval_str=True).items() if _is_typed(t)}
    result = annotations.pop("return", None)
    signature = inspect.signature(fn)
    enclosing = current_scope() if "<locals>" in fn.__qualname__ else None
    body = _with_checked_locals(fn)

    @functools.wraps(fn)
    def checked(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        with Scope(enclosing):
            for name, t in annotations.items():
                _check(t, bound.arguments[name], f"{fn.__name__}, argument {name}")
            value = body(*args, **kwargs)
            return value if result is None else _check(result, value, f"{fn.__name__}, result")

    return checked


# ---- shard_map --------------------------------------------------------------------------------------------------


def _place(array: ArrayType, value, where: str):
    """`value` sharded as the type says: replicated and host arrays are placed, other shardings rejected."""
    bindings = Bindings()
    try:
        axes_product(sorted(array.spec.sharded))
        spec = _strip(_partition_spec(array))
        if isinstance(value, Partial | Copy):
            raise ShardError("a partial sum or copy exists inside shard_map only", "pass an array")
        if not hasattr(value, "shape"):
            value = np.asarray(value, dtype=_DType(array.dtype).dtype)
        if isinstance(value, np.ndarray | np.generic):
            value = jax.dtypes.canonicalize_dtype(value.dtype).type(value) if value.shape == () else value
        _check_dtype(array, value)
        check_sizes(array.spec, value.shape, bindings, per_device=False)
        placement = outside_placement(value)
        wanted = tuple(dim.axes for dim in array.spec.dims)
        if placement is not None and any(without_trivial(placement)):
            check_value(array.spec, value, bindings)
    except ShardError as error:
        context = f"  value: {describe(value)}\n{bindings.context()}"
        raise ShardError(f"{where}: {array!r}: {error.problem}", error.remedy, context) from None
    bindings.commit()
    if placement == wanted:
        return value
    if not isinstance(value, jax.core.Tracer):
        return jax.device_put(value, spec)
    # Under a mesh of Auto axes JAX tells no shardings while it traces: shard_map itself places the value.
    explicit = all(kind == AxisType.Explicit for kind in jax.sharding.get_abstract_mesh().axis_types)
    return jax.reshard(value, spec) if explicit else value


def typed_shard_map(fn):
    """`jax.shard_map` over all axes of the mesh in force, its specs read from the annotations of `fn`, all checked.

    Every argument and the result are annotated with array types, pytree_dataclasses or tuples of them. The function
    returned takes whole arrays: those sharded as annotated go in as they are, replicated and host arrays are placed,
    any other sharding is a ShardError. Inside, `fn` sees this device's blocks, with everything that `typed` checks.
    """
    annotations = dict(inspect.get_annotations(fn, eval_str=True))
    signature = inspect.signature(fn)
    for name in (*signature.parameters, "return"):
        if not _is_typed(annotations.get(name)):
            what = "the result" if name == "return" else f"argument {name}"
            raise ShardError(
                f"typed_shard_map({fn.__name__}): {what} has no array type",
                "annotate it, e.g. f32['B/d M']; constants and options come in through the enclosing function",
            )
    result = annotations.pop("return")
    checked = typed(fn)

    @functools.wraps(fn)
    def mapped(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if jax.sharding.get_abstract_mesh().empty:
            raise ShardError(f"{fn.__name__}: no mesh is set", "call it under `with jax.set_mesh(mesh):`")
        placed, in_specs = [], []
        with Scope():
            for name, value in bound.arguments.items():
                leaves, specs, t = [], [], annotations[name]

                def place(path, array, part, name=name, leaves=leaves, specs=specs):
                    where = f"{fn.__name__}, argument {name}" + (f": {path}" if path else "")
                    leaves.append(_place(array, part, where))
                    specs.append(_strip(_partition_spec(array)))

                _walk(t, value, "", place)
                structure = jax.tree.structure(value)
                placed.append(jax.tree.unflatten(structure, leaves))
                in_specs.append(jax.tree.unflatten(structure, specs))
        return jax.shard_map(checked, in_specs=tuple(in_specs), out_specs=make_partition_specs(result))(*placed)

    return mapped


# ---- typeguard --------------------------------------------------------------------------------------------------


def register_with_typeguard() -> None:
    """Makes typeguard's `@typechecked` check array types too: arguments, results and annotated locals.

    typeguard evaluates string annotations, so specs of functions under it must be `bytes`: `f32[b'B/d M']`. Sizes are
    bound in the `Scope` in force; decorate with `scope` as well to give each call its own.
    """
    import typeguard

    def check(value, origin_type, args, memo) -> None:
        _check(origin_type, value, "value")

    def lookup(origin_type, args, extras):
        return check if isinstance(origin_type, ArrayType | StackedType) else None

    if not any(getattr(f, "__qualname__", "") == lookup.__qualname__ for f in typeguard.checker_lookup_functions):
        typeguard.checker_lookup_functions.append(lookup)
