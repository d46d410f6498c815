"""Every single change, of some kinds, to the specs and collectives of a module, for tests of what
notices them.

They are found in the syntax tree: strings that are specs, and calls of shardlib's ops, by whatever
names.
"""

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator

from shardlib.axes import AXIS_ORDER, GROUPS
from shardlib.parsing import ShardError, parse_op, parse_shape

AXES = ("r", "t", "d", "p")
"""Of the meshes on which mutants are traced."""
COLLECTIVES = {"all_gather", "psum_scatter", "psum", "pmax", "replicate"}


@functools.cache
def kinds_of_weights() -> dict:
    """The kinds of weights by name, which are indexed with a spec as the types of arrays are."""
    # the tests of shardlib have no trainer, and mutate no model
    from shardwright.modeling import weights

    return {
        name: value for name, value in vars(weights).items() if isinstance(value, weights.Declared)
    }


@dataclasses.dataclass(frozen=True)
class Mutant:
    kind: str
    line: int
    """In the source, from 1."""
    before: str
    after: str
    source: str = dataclasses.field(repr=False, compare=False)
    """The whole module, mutated."""
    file: str = "train.py"

    def __str__(self) -> str:
        return f"line {self.line}, {self.kind}: {self.before}  =>  {self.after}"


class Source:
    """A module's text, in which nodes of its tree are exchanged for other text."""

    def __init__(self, text: str):
        self.tree, self._raw = ast.parse(text), text.encode()
        self._ops = dict(_assigned_ops(self.tree))
        self._starts = [0]
        for line in self._raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _span(self, node: ast.expr) -> slice:
        def place(line, column):
            return self._starts[line - 1] + column

        return slice(
            place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
        )

    def of(self, node: ast.expr) -> str:
        return self._raw[self._span(node)].decode()

    def op(self, call: ast.Call) -> str:
        """Name of the function that is called; of an op also where it is called by a name of the
        module's own.
        """
        name = (
            call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        )
        return self._ops.get(name, name)

    def mutant(self, kind: str, node: ast.expr, after: str) -> Mutant:
        span = self._span(node)
        mutated = (self._raw[: span.start] + after.encode() + self._raw[span.stop :]).decode()
        return Mutant(
            kind, node.lineno, " ".join(self.of(node).split()), " ".join(after.split()), mutated
        )


def _assigned_ops(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(name, op) for each assignment of an op, such as `gather = shardops.all_gather`, in tuples
    too.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        in_tuples = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        for name, op in (
            zip(target.elts, value.elts, strict=True) if in_tuples else [(target, value)]
        ):
            if isinstance(op, ast.Attribute) and getattr(op.value, "id", "") == "shardops":
                yield name.id, op.attr


def mutants(text: str, file: str = "train.py") -> Iterator[Mutant]:
    """Those of the module `text`, each once."""
    source, seen = Source(text), {text}
    for mutant in _all_mutants(source):
        if mutant.source not in seen:
            seen.add(mutant.source)
            yield dataclasses.replace(mutant, file=file)


def _all_mutants(source: Source) -> Iterator[Mutant]:
    types = {
        id(node)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Subscript)
        for node in _of_type(node)
    }
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and (id(node) in types or is_spec(node.value))
        ):
            spec, *condition = node.value.partition(" if ")
            for kind, changed in spec_changes(spec):
                yield source.mutant(kind, node, f'"{changed}{"".join(condition)}"')
        elif isinstance(node, ast.Call):
            for kind, call in call_changes(source, node):
                yield source.mutant(kind, node, call)
        elif isinstance(node, ast.FunctionDef):
            yield from _other_counts(source, node)


def _other_counts(source: Source, function: ast.FunctionDef) -> Iterator[Mutant]:
    """Other divisors of a sum over devices, in a function of a TokenBatch `batch`."""
    batch = "batch" if "batch" in {argument.arg for argument in function.args.args} else ""
    for node in ast.walk(function):
        if not (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Div)
            and isinstance(node.left, ast.Call)
        ):
            continue
        if source.op(node.left) != "psum" or not batch:
            continue
        count = source.of(node.right)
        yield source.mutant("loss divided by a size", node.right, f"{batch}.targets.size")
        yield source.mutant(
            "loss divided by a device's count",
            node.right,
            f"jnp.sum(jnp.float32({batch}.loss_mask))",
        )
        for axis in AXES:
            for operator in "*/":
                text = f'({count} {operator} shardops.axis_size("{axis}"))'
                yield source.mutant("loss divided by a multiple", node.right, text)


def _of_type(node: ast.Subscript) -> list[ast.expr]:
    """The spec of `f32["B"]`, `Array["layers", X]` or `matrix["M -> F"]`, in a list; nothing for
    another subscript.
    """
    first = (
        node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
    )
    types = {"act", "f32", "i32", "u32", "bool_", "Array", *kinds_of_weights()}
    return [first] if getattr(node.value, "id", "") in types else []


# ---- specs ---------------------------------------------------------------------------------------

_AXIS = f"[{''.join(AXIS_ORDER)}]"
_WORD = rf"\[?[A-Za-z]+(/{_AXIS})*\]?|\.\.\.|[+*]{_AXIS}"
_SHAPE = rf"\s*(({_WORD})(\s+({_WORD}))*)?\s*"
_SPEC = re.compile(rf"{_SHAPE}(,{_SHAPE})*->{_SHAPE}|{_SHAPE}")


def is_spec(text: str) -> bool:
    """Whether a string is a spec: of an operation, or of a type that says how an array is
    sharded.
    """
    text = _without_groups(text)
    return _SPEC.fullmatch(text) is not None and (
        "->" in text or re.search(r"/[rtdp]\b|[+*][rtdp]\b", text) is not None
    )


def spec_changes(spec: str) -> Iterator[tuple[str, str]]:
    """(kind, the spec after it) for every single change of a kind that changes what the spec
    says.
    """
    spec = _without_groups(spec)
    yield from ((kind, new) for kind, new in _spec_changes(spec) if _meaning(new) != _meaning(spec))


def _without_groups(spec: str) -> str:
    """The spec with the axes of each group: of `B/b +b`, `B/r/d/e +r +d +e`."""
    for group, axes in GROUPS.items():
        spec = re.sub(rf"/{group}\b", "".join(f"/{axis}" for axis in axes), spec)
        spec = re.sub(
            rf"([+*]){group}\b", lambda m, axes=axes: " ".join(m[1] + axis for axis in axes), spec
        )
    return spec


def _meaning(spec: str):
    try:
        return parse_op(spec) if "->" in spec else parse_shape(spec)
    except ShardError:
        return spec


def _spec_changes(spec: str) -> Iterator[tuple[str, str]]:
    words = re.findall(r"->|,|[^\s,]+", spec)

    def text(words):
        return re.sub(r" ,", ",", " ".join(words))

    def changed(i, *new):
        return text([*words[:i], *new, *words[i + 1 :]])

    for i, word in enumerate(words):
        if word in ("->", ",", "..."):
            continue
        if word[0] in "+*":
            yield f"{word[0]}axis dropped", changed(i)
            for axis in AXES:
                if axis != word[1]:
                    yield "axis swapped", changed(i, word[0] + axis)
            continue
        name, *axes = word.strip("[]").split("/")

        def made(axes, name=name, word=word):
            return word.replace(word.strip("[]"), "/".join([name, *axes]))

        for axis in AXES:
            if axis in axes:
                yield "/axis dropped", changed(i, made([a for a in axes if a != axis]))
                for other in AXES:
                    if other not in axes:
                        yield (
                            "axis swapped",
                            changed(i, made([other if a == axis else a for a in axes])),
                        )
            else:
                yield "/axis added", changed(i, made(sorted([*axes, axis], key=AXIS_ORDER.index)))
        if len(axes) > 1:
            yield "axis order swapped", changed(i, made(axes[::-1]))
    # Behind each shape a mark more.
    ends = [i for i, word in enumerate(words) if word in ("->", ",")] + [len(words)]
    for start, end in zip([0, *(i + 1 for i in ends)], ends, strict=False):
        for mark in "+*":
            for axis in AXES:
                if mark + axis not in words[start:end]:
                    yield f"{mark}axis added", text([*words[:end], mark + axis, *words[end:]])
    # The same everywhere in the spec.
    used = [axis for axis in AXES if re.search(rf"[/+*]{axis}\b", spec)]
    for i, axis in enumerate(AXES):
        for other in AXES[i + 1 :]:
            if axis in used or other in used:
                swap = {axis: other, other: axis}
                new = re.sub(
                    r"(?<=[/+*])([rtdp])\b", lambda m, swap=swap: swap.get(m[1], m[1]), spec
                )

                def in_order(m):
                    return "/".join(["", *sorted(m[0][1:].split("/"), key=AXIS_ORDER.index)])

                yield "axes exchanged in a whole spec", re.sub(rf"(/{_AXIS})+\b", in_order, new)
    if sum(bool(re.search(rf"[/+*]{axis}\b", word)) for word in words for axis in used) > 1:
        for axis in used:
            yield "axis dropped from a whole spec", re.sub(rf"\s*[+*]{axis}\b|/{axis}\b", "", spec)


# ---- calls ---------------------------------------------------------------------------------------


def call_changes(source: Source, node: ast.Call) -> Iterator[tuple[str, str]]:
    """(kind, the call after it) for a collective's call."""
    name = source.op(node)
    if name not in COLLECTIVES or not node.args:
        return
    fn, operand = source.of(node.func), source.of(node.args[-1])
    before = ", ".join(source.of(arg) for arg in node.args[:-1])

    def call(fn, spec, x):
        return f"{fn}({spec}, {x})" if spec else f"{fn}({x})"

    yield "call removed", operand
    yield "call done twice", call(fn, before, call(fn, before, operand))
    spec = node.args[0]
    if not (isinstance(spec, ast.Constant) and "->" in str(spec.value)):
        return
    left, right = (side.strip() for side in spec.value.split("->"))
    reversed_spec = f'"{right} -> {left}"'
    for other in sorted(COLLECTIVES - {name}):
        yield "collective exchanged", call(f"shardops.{other}", before, operand)
    for other in ("all_gather", "psum_scatter"):
        yield "collective exchanged", call(f"shardops.{other}", reversed_spec, operand)
