"""What JAX refuses inside typed functions, told as a ShardError: the line, the types of its values, a remedy."""

import ast
import itertools
import linecache
import math
import re
import traceback
from types import TracebackType
from typing import Any

import jax

from shardlib.checks import current_scope, error_context, noted_type
from shardlib.parsing import Dim, ShapeSpec, ShardError, sort_axes
from shardlib.places import is_installed, is_raised_on_purpose, place, users_call
from shardlib.values import SHORT_DTYPES, WITHOUT_COPY, describe, is_opaque, mesh_axes

_ABOUT_TYPES = re.compile(
    "shape|size|dim|rank|broadcast|axis|axes|type|pytree|varying|reduced|replicated|shard|array|index|indices|vmap",
    re.I,
)
_BLOCKS = "inside shard_map an array has the shape of this device's block"


def told(error: Exception) -> ShardError | None:
    """`error`, which leaves a typed function, with what a user needs to know of it.

    Its place is the innermost line of the user's code. It shows what JAX says in short, and the values in the failed
    expression, with the types that annotations and ops have given them. None for an error that JAX did not raise about
    shapes, dtypes or shardings, and for a ShardError.
    """
    call = users_call(error)
    if call is None or isinstance(error, ShardError):
        return None
    if inside := _inside_partial_sum(error, call):
        return inside
    if not _is_about_types(error):
        return None
    frame, text = call.tb_frame, _expression(call)
    values = _values(text, frame.f_locals)
    short = " ".join(text.split())
    problem, remedy = _problem_and_remedy(str(error), values)
    where = f"`{short}`: " if 0 < len(short) <= 60 else ""
    found = ShardError(f"{where}{problem}", remedy, error_context(current_scope().sizes, **values))
    found.place = place(frame.f_code.co_filename, call.tb_lineno)
    return found


def _inside_partial_sum(error: Exception, call: TracebackType) -> ShardError | None:
    """What JAX refuses to do with the array in a partial sum; None for other errors.

    JAX's rules for unreduced values say which primitive refuses, and no more. Those for jax.vmap say nothing.
    """
    if str(error) and "unreduced" not in str(error):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # The value is in the frame of the user's code, or in one of JAX's below it.
    for frame in frames[frames.index(call.tb_frame) :]:
        for local in frame.f_locals.values():
            for value in local if isinstance(local, tuple | list) else (local,):
                kind = getattr(jax.typeof(value), "manual_axis_type", None) if isinstance(value, jax.Array) else None
                if kind and kind.unreduced:
                    said = str(error).partition(". Please")[0]
                    found = ShardError(
                        f"`{' '.join(_expression(call).split())}`: the array in a partial sum, {describe(value)}, was "
                        "given to a function that JAX cannot apply to each part of the sum",
                        f"reduce it over {', '.join(sort_axes(kind.unreduced))} first, with psum_scatter or psum; what "
                        "is linear is written with the partial sum itself: p + q, p - q, c * p; instead of jax.vmap, "
                        "name the dim in the spec",
                        f"  JAX: {said}" * bool(said),
                    )
                    found.place = place(call.tb_frame.f_code.co_filename, call.tb_lineno)
                    return found
    return None


def _is_about_types(error: Exception) -> bool:
    if isinstance(error, ShardError | jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        return False
    of_jax = type(error).__module__.split(".")[0] == "jax"  # ShardingTypeError is not public
    if not of_jax and not isinstance(error, TypeError | ValueError | IndexError | NotImplementedError):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    # JAX removes its frames where an error leaves it, and adds a note that says so.
    noted = any("JAX" in note for note in getattr(error, "__notes__", ())) and not is_raised_on_purpose(error)
    return (is_installed(frame.f_code.co_filename) or noted) and _ABOUT_TYPES.search(str(error)) is not None


def _expression(call: TracebackType) -> str:
    """Source of the expression that failed; empty if Python does not know it."""
    code = call.tb_frame.f_code
    first, last, start, end = list(code.co_positions())[call.tb_lasti // 2]
    if None in (first, last, start, end):
        return ""
    lines = [linecache.getline(code.co_filename, line).encode() for line in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return b"".join(lines).decode()


def _values(expression: str, variables: dict[str, Any]) -> dict[str, Any]:
    """The arrays, partial sums and copies that an expression names, such as `x` and `w.up`."""
    try:
        tree = ast.parse(f"({expression})", mode="eval")
    except SyntaxError:
        return {}

    def value_of(node: ast.AST) -> Any:
        if isinstance(node, ast.Name):
            return variables.get(node.id)
        return getattr(value_of(node.value), "__dict__", {}).get(node.attr) if isinstance(node, ast.Attribute) else None

    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    own = {
        id(name) for node in lambdas for name in ast.walk(node.body) if getattr(name, "id", None) in _parameters(node)
    }
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute) and id(node) not in own]
    values = {}
    for node in sorted(named, key=lambda node: (node.lineno, node.col_offset)):
        value, name = value_of(node), ast.unparse(node)
        parts = (
            {f"{name}[{i}]": part for i, part in enumerate(value)} if type(value) in (list, tuple) else {name: value}
        )
        values |= {name: part for name, part in parts.items() if isinstance(part, jax.Array) or is_opaque(part)}
    return values


def _parameters(node: ast.Lambda) -> set[str]:
    return {parameter.arg for parameter in ast.walk(node.args) if isinstance(parameter, ast.arg)}


# ---- what JAX says ----------------------------------------------------------------------------------------------


_GATHERED = re.compile(r"replicated on the same axes .* reduced on.* type: (?P<other>.*) and .*\{(?P<axes>.*)\}")
_CARRY = re.compile(
    r"(?P<loop>\w+) body function carry(?s:.*?)input carry (component )?(?P<name>\S+) has type (?P<first>.*?) "
    r"but .* type (?P<second>.*), so"
)
_BRANCHES = re.compile(
    r"output of (?P<one>\S+) has type (?P<first>.*?) but .* output of (?P<other>\S+) has type (?P<second>.*?), so"
)


def _problem_and_remedy(said: str, values: dict[str, Any]) -> tuple[str, str]:
    """What JAX says, in one line, and what to do about it; the remedy is empty if none is known."""
    if found := _GATHERED.search(said):
        names = ", ".join(_axes(found["axes"]))
        return (
            f"an array that was gathered over {names} meets one that was not, {_type_text(found['other'])}",
            "give the gathered array to einsum_unreduced, index_unreduced or broadcast: its gradient is a partial sum "
            f"over {names}, which jax.numpy does not know; {WITHOUT_COPY}",
        )
    if found := _CARRY.search(said):
        before = f"the carry {found['name']} of {found['loop']} goes in as"
        return _changed(before, found["first"], "and comes out as", found["second"], found["name"])
    if found := _BRANCHES.search(said):
        return _changed(f"{found['one']} gives", found["first"], f"and {found['other']} gives", found["second"])
    problem = said.splitlines()[0].partition(" Please ")[0].rstrip(".:")
    problem = re.sub(r"frozenset\((.*?)\)", lambda match: f"{{{', '.join(_axes(match[1]))}}}", problem)
    problem = re.sub(r"\b[a-z]+\d+\[[\d,]*\]\{.*?\}", lambda match: _type_text(match[0]), problem)
    if "varying manual axes" in said:
        return (
            problem,
            "gather or reduce the one that differs, or mark a constant with jax.lax.pcast(x, axes, to='varying')",
        )
    if "cannot reshape" in said:
        return problem, f"{_BLOCKS}: take sizes from x.shape, not from the configuration"
    shapes = [[int(n) for n in re.findall(r"\d+", shape)] for shape in re.findall(r"\(([\d, ]+)\)", said)]
    return problem, _about_sizes(shapes, values)


def _about_sizes(shapes: list[list[int]], values: dict[str, Any]) -> str:
    """Remedy for the sizes of two shapes, compared from the last, that differ; empty if none do."""
    pairs = [pair for a, b in itertools.combinations(shapes, 2) for pair in zip(a[::-1], b[::-1], strict=False)]
    pairs = [(min(pair), max(pair)) for pair in pairs if 1 < min(pair) < max(pair)]
    for small, large in pairs:
        for name, value in values.items():
            if remedy := _gather(name, value, small, large):
                return remedy
    if any(0 < len(a) < len(b) and b[: len(a)] == a for a, b in itertools.permutations(shapes, 2)):
        return "dims are matched from the last: x[..., None] adds a dim of 1 there"
    for small, large in pairs:
        if groups := _axes_of(small, large):
            return (
                f"{large} is {small} × the {large // small} devices of {' or '.join(map('/'.join, groups))}: one seems "
                "to be a block, and the other whole. Gather the block with all_gather, or shard the other"
            )
        return f"make {small} and {large} equal; {_BLOCKS}"
    return ""


def _axes_of(small: int, large: int) -> list[tuple[str, ...]]:
    """Axes over which a dim of size `large` has blocks of size `small`, the fewest first."""
    sizes = {axis: size for axis, size in mesh_axes().items() if size > 1}
    groups = itertools.chain.from_iterable(itertools.combinations(sizes, n + 1) for n in range(len(sizes)))
    return [sort_axes(axes) for axes in groups if math.prod(sizes[axis] for axis in axes) * small == large]


def _gather(name: str, value: Any, small: int, large: int) -> str:
    """Remedy if a dim of a value has blocks of size `small`, by its type, and is `large` as a whole; empty if not."""
    spec, _ = noted_type(value)
    for dim, size in zip(spec.dims if spec else (), value.shape, strict=False):
        for axes in _axes_of(small, large):
            if size == small and dim.axes[-len(axes) :] == axes:
                whole = Dim(dim.name, dim.axes[: -len(axes)])
                gathered = ShapeSpec(tuple(whole if part is dim else part for part in spec.dims))
                return (
                    f"dim {dim} of {name} has a block of {small} here, where the other has {large}: "
                    f"all_gather('{spec} -> {gathered}', {name}) first, or shard the other over {'/'.join(axes)} too"
                )
    return ""


# ---- types as JAX writes them -----------------------------------------------------------------------------------

_STATES = {"V": "varying", "R": "gathered", "U": "unreduced"}


def _axes(text: str) -> tuple[str, ...]:
    """The axes in a text such as `(d,t)`, `{'d', 't'}` or `d`."""
    return sort_axes(re.findall(r"\w+", text))


def _read_type(text: str) -> tuple[str, str, dict[str, tuple[str, ...]]]:
    """dtype, sizes and axes of `float32[2,3]{V:(d,t), R:r}`, the axes by state."""
    dtype, shape, states = re.fullmatch(r"(\w+)\[(.*?)\](.*)", text).groups()
    found = re.findall(r"([VRU]):(\(.*?\)|\w+)", states)
    return SHORT_DTYPES.get(dtype, dtype), shape, {state: _axes(axes) for state, axes in found}


def _type_text(text: str) -> str:
    """A type of JAX as other messages write it: `f32[2,3] {varying over d}`."""
    dtype, shape, axes = _read_type(text)
    states = [f"{word} over {', '.join(axes[state])}" for state, word in _STATES.items() if state in axes]
    return f"{dtype}[{shape}] {{{'; '.join(states) or 'the same on every device'}}}"


def _changed(before: str, first: str, between: str, second: str, name: str = "x") -> tuple[str, str]:
    """Problem and remedy where two types, of a carry or of branches, should be equal."""
    problem = f"{before} {_type_text(first)} {between} {_type_text(second)}"
    (dtype, shape, axes), (new_dtype, new_shape, new_axes) = _read_type(first), _read_type(second)
    differing = lambda state: sort_axes(set(axes.get(state, ())) ^ set(new_axes.get(state, ())))
    if shape != new_shape:
        sizes = [[int(n) for n in re.findall(r"\d+", text)] for text in (shape, new_shape)]
        return problem, _about_sizes(sizes, {}) or "give both one shape"
    if dtype != new_dtype:
        return problem, f"cast one of them with .astype: {dtype} and {new_dtype}"
    if gathered := differing("R"):
        marks = " ".join(f"*{axis}" for axis in gathered)
        return problem, f"gather into a copy, `{marks}`: an array that is only gathered is used where it is gathered"
    names, name = ", ".join(differing("V")), name if name.isidentifier() else "x"
    return problem, (
        f"if it is to be the same on every device of {names}, reduce or gather it over {names} (psum, all_gather); "
        f"if it differs, and only starts as a constant: jax.lax.pcast({name}, {differing('V')!r}, to='varying')"
    )
