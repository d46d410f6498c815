"""Turns errors of JAX inside typed functions into ShardErrors.

They have the line, its values' types, and a remedy.
"""

import itertools
import linecache
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from shardlib.checks import error_context, noted_type
from shardlib.describe import SHORT_DTYPES, states_text
from shardlib.equations import axes_of, frames_of, is_variable, jaxprs_of, kinds
from shardlib.interpret import Domain, Operation, equations_in, interpret, needed_for
from shardlib.mesh import devices_along
from shardlib.opaque import is_opaque
from shardlib.parsing import MAY_BE_RIGHT, Dim, ShapeSpec, ShardError
from shardlib.places import is_installed, is_raised_on_purpose, is_users, place, users_call
from shardlib.scopes import current_scope

_BLOCKS = "inside shard_map an array has the shape of this device's block"
WITHOUT_MAXIMUM = (
    "take the maximum out of the gradient: pmax(spec, jax.lax.stop_gradient(x)); a softmax and "
    "its gradient do not depend on what is subtracted. For the gradient of a maximum itself, "
    "gather the dim: jnp.max of all_gather(..., replicated=True)"
)
_PLAIN = (
    "for a jax.numpy function, such as a norm or top_k, gather a plain array: all_gather(..., "
    "replicated=True); or pass the gathered array to einsum_unreduced, index_unreduced or "
    "broadcast, which know that its gradient is a partial sum"
)
_OF_JAX = (
    "gather with shardops.all_gather: JAX does not know that jax.lax.all_gather returns the same "
    "on every device"
)
_OF_WEIGHTS = (
    "a weight that was gathered over them varies for JAX: use it where they shard a dim of the "
    "activations, such as `L/c/t` (all_to_all moves an axis to another dim), then gather the result"
)
_REMEDIES = {
    "unreduced": (
        "reduce the partial sum first, with psum_scatter or psum; linear operations work on the "
        "partial sum itself: p + q, p - q, c * p; instead of jax.vmap, name the dim in the spec"
    ),
    "reduced on": _PLAIN,
    "are reduced": _PLAIN,
    "manual ax": (
        "reduce or gather what differs (psum, all_gather); make a constant that is to differ, "
        "such as the first state of a scan, of what differs: jnp.zeros_like(x[0])"
    ),
    "Differentiation rule for 'pm": WITHOUT_MAXIMUM,
    "dtypes do not match": "cast one of them with .astype",
    "cannot reshape": f"{_BLOCKS}: take sizes from x.shape, not from the configuration",
}
"""The remedy for an error of JAX that contains these words."""
_REDUCTION = re.compile(r"reduce_(?!precision)|arg(max|min)|cum|sort|top_k")
_TYPE = re.compile(r"\b(?P<dtype>[a-z]+\d+)\[(?P<shape>[\d,]*)\](?P<states>\{.*?\})?")


def explain(error: Exception) -> ShardError | None:
    """Turns an `error` that leaves a typed function into a ShardError for the user.

    It says what a user needs to know. Its place is the innermost line of the user's code. It shows
    JAX's message in short, and the values in the failed expression with the types that annotations
    and ops have given them. None for an error that JAX did not raise.
    """
    call = users_call(error)
    if call is None or not _is_of_jax(error):
        return None
    frame = call.tb_frame
    text = _expression(call)
    values = _values(text, frame.f_locals)
    short = " ".join(text.split())
    where = f"`{short}`" if 0 < len(short) <= 60 else ""
    said = _shortened(str(error) or "it has no rule for unreduced values under jax.vmap")
    remedy = next((remedy for words, remedy in _REMEDIES.items() if words in said), None)
    remedy = _about_sizes(said, values) if remedy is None else remedy
    if "unreduced" in said:
        said = (
            "the array in a partial sum was given to a function that JAX cannot apply to each "
            f"part of it: {said}"
        )
    found = ShardError(said, remedy, place=place(frame.f_code.co_filename, call.tb_lineno))
    return found.located(where, error_context(current_scope().sizes, **values))


def add_origin(error: ShardError, run: Callable[[], Any]) -> None:
    """Adds to an `error` about one value the line that made the value.

    Instead it may be the line that reduced only this device's block of it. `run` is the function
    that raised the error; it is traced once more. If the value differs over axes that its type
    lacks, the line is that of the last reduction whose result differs: it lacks a collective.
    """
    if error.about is None:
        return
    _, axes = error.about
    error.about = None

    def until() -> Any:
        try:
            run()
        except ShardError as again:
            return again.about[0]

    try:
        jaxpr = jax.make_jaxpr(until)().jaxpr
    except Exception:  # the value is inside a loop or a branch
        return
    differing = _Differing(axes)
    if axes and not any(interpret(ClosedJaxpr(jaxpr, jaxpr.constvars), differing, [])):
        error.problem = error.problem.replace("the value differs", "for JAX the value differs")
        of_weights = axes <= current_scope().of_weights
        error.remedy = f"{_OF_WEIGHTS if of_weights else _OF_JAX}; {MAY_BE_RIGHT}"
        return

    def reads(eqn: Any, is_used: bool) -> list | None:
        return [*filter(differing.varies, eqn.invars)] if is_used else None

    led, _ = needed_for(jaxpr, jaxpr.outvars, reads)
    for eqn in reversed(led):
        names = [
            eqn.primitive.name,
            *(e.primitive.name for inner in jaxprs_of(eqn) for e in equations_in(inner)),
        ]
        reduced = next(
            (name.removeprefix("reduce_") for name in names if _REDUCTION.match(name)), ""
        )
        if axes and not reduced:
            continue
        how = f", as the {reduced} of this device's block alone" if axes else ""
        frames = frames_of(eqn)
        calls = [file == __file__ for file, _ in frames]
        inner = frames if axes else frames[len(frames) - calls[::-1].index(True) :]
        users = [frame for frame in inner if is_users(frame[0])]
        if users and (at := place(*users[-1 if axes else 0])) != error.place:
            error.context = "\n".join(filter(None, [f"  made at {at}{how}", error.context]))
        return


class _Differing(Domain[bool]):
    """True for values that may differ over `axes`.

    They differ in JAX's types, and not just because of a gather.
    """

    def __init__(self, axes: set[str]):
        self._axes = axes

    def varies(self, var: Any) -> bool:
        """True if JAX's type of a variable differs over the axes."""
        return bool(self._axes & var.aval.manual_axis_type.varying)

    def constant(self, x: Any) -> bool:
        return is_variable(x) and self.varies(x)

    def follow(self, op: Operation, ins: list[bool]) -> list[bool]:
        is_gather = op.name in kinds("gather") and self._axes <= {*axes_of(op.eqn)}
        if is_gather or (ins and not any(ins)):
            return [False] * len(op.eqn.outvars)
        return list(map(self.varies, op.eqn.outvars))


def _is_of_jax(error: Exception) -> bool:
    """True if JAX raised the error, about arguments.

    Errors about values that are unknown while JAX traces do not count.
    """
    if isinstance(error, ShardError | jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        return False
    of_jax = type(error).__module__.split(".")[0] == "jax"  # ShardingTypeError is not public
    of_arguments = TypeError | ValueError | IndexError | NotImplementedError
    if not of_jax and not isinstance(error, of_arguments):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    # JAX removes its frames where an error leaves it, and adds a note that says so.
    noted = any(
        "JAX" in note for note in getattr(error, "__notes__", ())
    ) and not is_raised_on_purpose(error)
    file = frame.f_code.co_filename
    return noted or (is_installed(file) and not {"jax", "opt_einsum"}.isdisjoint(Path(file).parts))


def _expression(call: TracebackType) -> str:
    """Source of the expression that failed; empty if Python does not know it."""
    code = call.tb_frame.f_code
    first, last, start, end = list(code.co_positions())[call.tb_lasti // 2]
    if first is None or last is None or None in (start, end):
        return ""
    lines = [linecache.getline(code.co_filename, line).encode() for line in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return b"".join(lines).decode()


def _values(expression: str, variables: dict[str, Any]) -> dict[str, Any]:
    """The arrays, partial sums and copies that an expression names, such as `x` and `w.up`."""
    found = {}
    for name in re.findall(r"(?<![\w.'\"])[A-Za-z_]\w*(?:\.\w+)*", expression):
        first, *attributes = name.split(".")
        value = variables.get(first)
        shown = first
        for attribute in attributes:
            if hasattr(value, "shape") or is_opaque(value):
                break
            value = getattr(value, "__dict__", {}).get(attribute)
            shown = f"{shown}.{attribute}"
        parts = enumerate(value or ()) if type(value) in (list, tuple) else ()
        found |= {shown: value} | {f"{shown}[{i}]": part for i, part in parts}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, jax.Array) or is_opaque(value)
    }


def _shortened(said: str) -> str:
    """Shortens JAX's message to one sentence, about types if there is one.

    Types are as other messages write them.
    """
    sentence = next(
        (line for line in said.splitlines() if " has type " in line), said.splitlines()[0]
    )
    sentence = sentence.partition(" Please ")[0].rstrip(".:")

    def type_text(match: re.Match) -> str:
        axes = dict(re.findall(r"([VRU]):(\(.*?\)|\w+)", match["states"] or ""))
        states = states_text(*(re.findall(r"\w+", axes.get(state, "")) for state in "VRU"))
        return f"{SHORT_DTYPES.get(match['dtype'], match['dtype'])}[{match['shape']}] {states}"

    return _TYPE.sub(type_text, sentence)


def _about_sizes(said: str, values: dict[str, Any]) -> str:
    """Remedy for two shapes that differ in a size, compared from the last dim.

    Empty if they do not differ.
    """
    shapes = [
        [int(n) for n in re.findall(r"\d+", shape)] for shape in re.findall(r"\(([\d, ]+)\)", said)
    ]
    of_two = [
        enumerate(zip(a[::-1], b[::-1], strict=False)) for a, b in itertools.combinations(shapes, 2)
    ]
    pairs = [
        (min(pair), max(pair), k)
        for pairs in of_two
        for k, pair in pairs
        if 1 < min(pair) < max(pair)
    ]
    for (small, large, k), (name, value) in itertools.product(pairs, values.items()):
        spec = noted_type(value)[0] or ShapeSpec()
        is_operand = [*value.shape] in shapes  # else the shapes are those of some of its dims
        for i, dim in enumerate(spec.dims):
            if is_operand and i != len(value.shape) - 1 - k:
                continue
            if value.shape[i] == small and small * devices_along(dim.axes) == large:
                gathered = ShapeSpec((*spec.dims[:i], Dim(dim.name), *spec.dims[i + 1 :]))
                return (
                    f"dim {dim} of {name} has a block of {small} here, where the other has "
                    f"{large}: all_gather('{spec} -> {gathered}', {name}) first, or shard the "
                    f"other over {'/'.join(dim.axes)} too"
                )
    if any(0 < len(a) < len(b) and b[: len(a)] == a for a, b in itertools.permutations(shapes, 2)):
        return "dims are matched from the last: x[..., None] adds a dim of 1 there"
    return f"make {pairs[0][0]} and {pairs[0][1]} equal; {_BLOCKS}" if pairs else ""
