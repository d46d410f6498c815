"""Functions whose annotations are checked at each call, while JAX traces: `typed`, `typed_shard_map`, typeguard."""

import ast
import functools
import inspect
import textwrap
import types

import jax
import numpy as np
from jax.sharding import AxisType

from shardlib.array_types import ArrayType, DType, StackedType, is_typed, make_partition_specs, partition_spec, walk
from shardlib.checks import Bindings, Scope, check_sizes, check_value, current_scope
from shardlib.parsing import ShardError
from shardlib.values import SHORT_DTYPES, Copy, Partial, axes_product, describe, outside_placement, without_trivial

# ---- checking annotated functions -------------------------------------------------------------------------------


def _check_dtype(t: ArrayType, value) -> None:
    if not hasattr(value, "dtype"):
        raise ShardError(f"a {type(value).__name__} is no array", "pass an array")
    found, wanted = (SHORT_DTYPES.get(dtype.name, dtype.name) for dtype in (value.dtype, DType(t.dtype).dtype))
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
        walk(t, value, "", visit)
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
        lambda t, value, name: _check(t, value, f"{fn.__name__}, local {name}") if is_typed(t) else value
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
    annotations = {k: t for k, t in inspect.get_annotations(fn, eval_str=True).items() if is_typed(t)}
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
        spec = partition_spec(array)
        if isinstance(value, Partial | Copy):
            raise ShardError("a partial sum or copy exists inside shard_map only", "pass an array")
        if not hasattr(value, "shape"):
            value = np.asarray(value, dtype=DType(array.dtype).dtype)
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
        if not is_typed(annotations.get(name)):
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
                    specs.append(partition_spec(array))

                walk(t, value, "", place)
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
