"""Decorators that check annotations at each call, while JAX traces: `typed`, `typed_shard_map`."""

import ast
import functools
import inspect
import types
import typing
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import core
from jax.sharding import AxisType

from shardlib import jax_errors
from shardlib.array_types import (
    ABSENT,
    ArrayType,
    DType,
    arrays_in,
    arrays_of,
    is_typed,
    partition_spec,
)
from shardlib.checks import check_sharding, check_sizes, check_value, checking, note_type
from shardlib.describe import SHORT_DTYPES, describe, sharding_of, without_trivial
from shardlib.mesh import devices_along, inside_shard_map, mesh_axes, on_mesh
from shardlib.opaque import AtRest, is_opaque
from shardlib.parsing import ShardError
from shardlib.places import place_of
from shardlib.scopes import Scope, current_scope

Function = typing.TypeVar("Function", bound=Callable)

# ---- checking annotated functions ----------------------------------------------------------------


def _check_dtype(t: ArrayType, value) -> None:
    found, wanted = (
        SHORT_DTYPES.get(dtype.name, dtype.name) for dtype in (value.dtype, t.jax_dtype)
    )
    if found != wanted:
        bound_by = f" ({t.dtype} here)" if wanted != t.dtype else ""
        raise ShardError(
            f"dtype mismatch: {found}, where {wanted}{bound_by} is declared",
            f"cast with .astype, or declare {found}",
        )


def _check(t, value, where: str):
    """Checks `value` against the annotation `t` and returns it."""
    for path, array, part in arrays_in(t, value, where):
        with checking(f"{path}: {array!r}", value=part) as sizes:
            check_value(array.spec, part, sizes, gathered_ahead=True)
            if not isinstance(part, AtRest):  # all_gather gives it the dtype in which it is used
                _check_dtype(array, part)
        note_type(part, array.spec)
    return value


class _CheckLocals(ast.NodeTransformer):
    """Turns `x: T = v` into `x: T = __check_local__(T, v, 'x')`, also in nested functions."""

    def visit_ClassDef(self, node: ast.ClassDef):
        return node  # annotations there declare fields

    def visit_AnnAssign(self, node: ast.AnnAssign):
        if node.value is not None and isinstance(node.target, ast.Name):
            arguments = [node.annotation, node.value, ast.Constant(node.target.id)]
            node.value = ast.copy_location(
                ast.Call(ast.Name("__check_local__", ast.Load()), arguments, []), node.value
            )
        return node


def _source(fn) -> ast.FunctionDef | None:
    """AST of the definition of `fn`, with the line numbers of its file.

    Returns None if Python finds no source.
    """
    try:
        lines, first_line = inspect.getsourcelines(fn)
        indented = lines[0][:1].isspace()
        # Under an `if`, code keeps the indentation it has in its file; dedenting would change
        # multi-line strings.
        module: Any = ast.parse("".join(["if True:\n", *lines] if indented else lines))
    except (OSError, TypeError, SyntaxError):
        return None
    node = module.body[0].body[0] if indented else module.body[0]
    if isinstance(node, ast.FunctionDef):
        return ast.increment_lineno(node, first_line - 1 - indented)
    return None


def _with_checked_locals(fn):
    """Recompiles `fn` with a check at each annotated assignment.

    Returns `fn` itself if it has none, or no source.
    """
    # Already typed, perhaps under other decorators: functools.wraps copies the mark.
    if hasattr(fn, "_checks_locals"):
        return fn
    node = _source(fn)
    if node is not None and not any(isinstance(n, ast.AnnAssign) for n in ast.walk(node)):
        return fn
    if node is None or inspect.unwrap(fn) is not fn:
        problem = "its annotated locals go unchecked: put @typed directly above its def, in a file"
        warnings.warn(f"typed({fn.__qualname__}): {problem}", stacklevel=3)
        return fn
    # An outer function provides the variables of its closure. Only the code of `fn` is used and
    # nothing is run, so decorators, defaults and annotations are not evaluated twice.
    cells: dict[str, types.CellType] = dict(
        zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    )
    cells["__check_local__"] = types.CellType(
        lambda t, value, name: (
            _check(t, value, f"{fn.__name__}, local {name}") if is_typed(t) else value
        )
    )
    module: Any = ast.parse(f"def __outer__({', '.join(cells)}): pass")
    module.body[0].body = [ast.fix_missing_locations(_CheckLocals().visit(node))]
    # else a call of `fn` inside itself would find this definition instead of the user's
    node.name = "__checked__"
    code = compile(module, fn.__code__.co_filename, "exec")
    for name in ("__outer__", "__checked__"):
        code = next(
            c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name
        )
    code = code.replace(co_name=fn.__code__.co_name, co_qualname=fn.__code__.co_qualname)
    closure = tuple(cells[name] for name in code.co_freevars)
    new = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, closure)
    new.__kwdefaults__ = fn.__kwdefaults__
    return functools.update_wrapper(new, fn)


def typed(fn: Function) -> Function:
    """Decorator that checks the array types of a function at each call, while JAX traces.

    These are the types of its arguments, its result and its annotated locals. Each call has its own
    `Scope`, so dims of different functions are unrelated. A function defined inside a typed one
    starts with the sizes bound there. Annotations without array types are ignored.

    Put the decorator directly above the `def`. A local is checked where it is assigned with an
    annotation, not where it is assigned again without one. If Python finds no source (`python -c`,
    `exec`), or another decorator is between, a warning says that locals are not checked.

    Raises:
        ShardError: a value does not have its type, or an annotation cannot be checked.
    """
    annotations = {
        k: t for k, t in inspect.get_annotations(fn, eval_str=True).items() if is_typed(t)
    }
    result = annotations.pop("return", None)
    signature = inspect.signature(fn)
    enclosing = current_scope() if "<locals>" in fn.__qualname__ else None
    body = _with_checked_locals(fn)

    def run(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        with Scope(enclosing):
            for name in filter(annotations.__contains__, bound.arguments):
                _check(annotations[name], bound.arguments[name], f"{fn.__name__}, argument {name}")
            try:
                value = body(*args, **kwargs)
            except Exception as error:
                if explained := jax_errors.explain(error):
                    raise explained from error
                raise
            try:
                value = value if result is None else _check(result, value, f"{fn.__name__}, result")
            except ShardError as error:
                error.place = place_of(fn)
                raise
            return value

    @functools.wraps(fn)
    def checked(*args, **kwargs):
        try:
            value = run(*args, **kwargs)
        except ShardError as error:
            jax_errors.add_origin(error, lambda: run(*args, **kwargs))
            raise
        return note_type(value, on_mesh(result.spec)) if isinstance(result, ArrayType) else value

    checked._checks_locals = True  # pyright: ignore[reportAttributeAccessIssue] (a mark of ours)
    return typing.cast(Function, checked)


# ---- shard_map -----------------------------------------------------------------------------------


def _place(path: str, array: ArrayType, value):
    """Shards `value` as its type says.

    Places replicated and host arrays; raises ShardError for any other sharding.
    """
    with checking(f"{path}: {array!r}", value=value) as sizes:
        devices_along(sorted(array.spec.sharded))
        if not hasattr(value, "shape"):
            value = np.asarray(value, dtype=DType(array.dtype).dtype)
        if isinstance(value, np.ndarray | np.generic) and value.shape == ():
            value = jax.dtypes.canonicalize_dtype(value.dtype).type(value)
        _check_dtype(array, value)
        check_sizes(array.spec, value.shape, sizes)
        sharding = sharding_of(value)
        if sharding is not None and any(without_trivial(sharding)):
            check_sharding(array.spec, value)
    if sharding == tuple(dim.axes for dim in array.spec.dims):
        return value
    if not isinstance(value, core.Tracer):
        return jax.device_put(value, partition_spec(array))
    # On a mesh of Auto axes JAX does not know shardings while it traces: shard_map itself places
    # the value.
    explicit = all(
        kind == AxisType.Explicit for kind in jax.sharding.get_abstract_mesh().axis_types
    )
    return jax.reshard(value, partition_spec(array)) if explicit else value


def typed_shard_map(fn: Function) -> Function:
    """Decorator for `jax.shard_map` over all axes of the current mesh, checked at each call.

    The specs come from the annotations. Annotate every argument and the result with array types, or
    pytree_dataclasses, tuples, lists and dicts of them. Keyword-only arguments without array types
    are options: Python numbers, not data. The decorated function takes whole arrays: those sharded
    as annotated are passed as they are, replicated and host arrays are placed, and any other
    sharding raises ShardError. `fn` itself runs once per device, on blocks, and is checked as by
    `typed`.
    """
    annotations = dict(inspect.get_annotations(fn, eval_str=True))
    signature = inspect.signature(fn)
    options = {
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and not is_typed(annotations.get(name))
    }
    for name in (*(name for name in signature.parameters if name not in options), "return"):
        what = "the result" if name == "return" else f"argument {name}"
        _check_has_sharding(annotations.get(name), f"typed_shard_map({fn.__name__}): {what}")
    result = annotations.pop("return")
    checked = typed(fn)

    @functools.wraps(fn)
    def mapped(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        _check_is_outside(fn.__name__)
        given = {name: bound.arguments.pop(name) for name in options & bound.arguments.keys()}
        _check_options(fn.__name__, given)
        arrays, specs = _place_arguments(fn.__name__, annotations, bound.arguments)
        structure = jax.tree.structure(tuple(bound.arguments.values()))
        results = _Results(fn, result, specs)

        def per_device(arrays):
            values = dict(zip(bound.arguments, structure.unflatten(arrays), strict=True))
            call = inspect.BoundArguments(signature, values | given)
            return results.split(checked(*call.args, **call.kwargs))

        out = jax.shard_map(per_device, in_specs=(specs,), out_specs=results.out_specs)(arrays)
        return results.merge(out)

    return typing.cast(Function, mapped)


def _check_has_sharding(t: object, what: str) -> None:
    """Raises ShardError for an annotation of whole arrays that has + or * marks, or no types."""
    for path, array, _ in arrays_of(t, ABSENT, what, only_arrays=True):
        try:
            partition_spec(array)
        except ShardError as error:
            raise error.located(path) from None


def _check_is_outside(name: str) -> None:
    """Raises ShardError unless the function `name` is called with a mesh, outside of shard_map."""
    if not mesh_axes():
        raise ShardError(f"{name}: no mesh is set", "call it under `with jax.set_mesh(mesh):`")
    if inside_shard_map():
        raise ShardError(
            f"{name}: called inside shard_map", "decorate functions called there with typed"
        )


def _check_options(name: str, options: dict[str, Any]) -> None:
    """Raises ShardError for an option of the function `name` that holds an array."""
    for option, value in options.items():
        if any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value)):
            raise ShardError(
                f"{name}: option {option} is {describe(value)}, but an array needs a type",
                "annotate it, e.g. f32['B/d M'], or pass a Python number",
            )


def _place_arguments(
    name: str, annotations: dict[str, Any], arguments: dict[str, Any]
) -> tuple[list, list]:
    """Shards the arguments of the function `name`. Returns their arrays, and the spec of each."""
    arrays, specs, types = [], [], []
    with Scope():
        for argument, value in arguments.items():
            parts = arrays_in(annotations[argument], value, f"{name}, argument {argument}")
            arrays += [_place(*part) for part in parts]
            specs += [partition_spec(array) for _, array, _ in parts]
            types += [array.spec for _, array, _ in parts]
    current_scope().arguments.append(types)
    return arrays, specs


class _Results:
    """The result of a function under shard_map, as lists of arrays.

    Which parts of the result are None is known only after `fn` has run, so its arrays leave in one
    list for each sharding. A Factor's dims depend on its value: its sharding must be that of an
    argument.

    Attributes:
        out_specs: the sharding of each list.

    Args:
        fn: the function.
        t: the type of its result.
        specs: the shardings of its arguments.
    """

    def __init__(self, fn: Callable, t: Any, specs: list):
        self._fn, self._type = fn, t
        declared = (partition_spec(array) for _, array, _ in arrays_of(t, ABSENT))
        self.out_specs = list(dict.fromkeys([*declared, *specs]))
        self._lists: list[int] = []
        self._structure: Any = None

    def split(self, value: Any) -> list[list]:
        """Splits the result on a device into lists of arrays."""
        self._structure = jax.tree.structure(value, is_leaf=is_opaque)
        parts = arrays_in(self._type, value, f"{self._fn.__name__}, result")
        for part in parts:
            self._check_can_leave(*part)
        self._lists = [self.out_specs.index(partition_spec(array)) for _, array, _ in parts]
        lists: list[list] = [[] for _ in self.out_specs]
        for (_, _, x), i in zip(parts, self._lists, strict=True):
            lists[i].append(x)
        return lists

    def merge(self, lists: list[list]) -> Any:
        """Puts the lists together again, outside of shard_map."""
        rest = list(map(iter, lists))
        return jax.tree.unflatten(self._structure, [next(rest[i]) for i in self._lists])

    def _check_can_leave(self, path: str, array: ArrayType, part: Any) -> None:
        if is_opaque(part) or jax.typeof(part).manual_axis_type.reduced:
            error = ShardError(
                "a copy or a gathered array cannot leave shard_map",
                "return it as it was before, or all_gather(..., replicated=True)",
                place=place_of(self._fn),
            )
            raise error.located(f"{path}: {array!r}", f"  value: {describe(part)}")
        if partition_spec(array) not in self.out_specs:
            raise ShardError(
                f"{path}: {array!r} is a Factor, and no argument is one",
                "pass its state",
                place=place_of(self._fn),
            )


# ---- typeguard -----------------------------------------------------------------------------------


def register_with_typeguard() -> None:
    """Makes typeguard's `@typechecked` check array types too.

    It checks those of arguments, results and annotated locals. typeguard evaluates string
    annotations, so specs of functions under it must be `bytes`: `f32[b'B/d M']`. Sizes are bound in
    the current `Scope`: decorate with `scope` as well to give each call its own.
    """
    import typeguard

    def check_array_type(value, origin_type, args, memo) -> None:
        try:
            _check(origin_type, value, "value")
        except ShardError as error:
            raise typeguard.TypeCheckError(str(error)) from None

    def lookup_array_type(origin_type, args, extras):
        if is_typed(origin_type) and not isinstance(origin_type, typing.TypeVar):
            return check_array_type
        return None

    lookups = typeguard.checker_lookup_functions
    known = {getattr(lookup, "__qualname__", "") for lookup in lookups}
    if lookup_array_type.__qualname__ not in known:
        lookups.append(lookup_array_type)
