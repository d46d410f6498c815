"""Wrong programs that differ in one place from a right one: a collective, an axis, an offset, a
mask, or a type.

Which of them compute something else on several devices than on one is known by running them:
MUTANTS has their names. To write it anew, with eight devices, without which nothing runs:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.programs.mutated`.
"""

import ast
import collections
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

from tests.programs import methods, right
from tests.programs.program import RIGHT, Program, distance, one_device, run
from tests.support.mutants import Source

MUTANTS = Path(__file__).parent / "wrong_mutants.txt"
DIFFERENT = 1e-2
ANOTHER = {"psum": "pmean", "pmean": "psum", "pmax": "pmin", "pmin": "pmax"}
MOVES = {"all_gather", "psum_scatter", "ppermute", "all_to_all", "pcast", "whole", "same", "own"}
OF_THE_DEVICE = {"axis_index": "0", "axis_size": "1", "offset": "0", "places": "jnp.arange({})"}
AXES = "rtdp"
COMPARISONS = {ast.GtE: ">", ast.Lt: "<="}


def changed_call(text, node: ast.Call) -> Iterator[tuple[str, str]]:
    """(what is wrong, the call after it) for a call of a collective, or of what a device knows of
    itself.
    """
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    arguments = [text(argument) for argument in node.args]
    rest = "".join(f", {argument}" for argument in arguments[1:])
    if name in ANOTHER:
        yield f"without {name}", arguments[0]
        yield f"{ANOTHER[name]} for {name}", f"lax.{ANOTHER[name]}({arguments[0]}{rest})"
    if name == "psum":
        yield "summed twice", f"lax.psum({text(node)}{rest})"
    if name in MOVES and arguments:
        yield f"without {name}", arguments[0]
    if name in OF_THE_DEVICE:
        yield f"without {name}", OF_THE_DEVICE[name].format(arguments[-1])
    for keyword in node.keywords:
        if isinstance(keyword.value, ast.Constant) and keyword.arg in (
            "axis",
            "split_axis",
            "concat_axis",
        ):
            other = text(node).replace(
                f"{keyword.arg}={keyword.value.value}", f"{keyword.arg}={1 - keyword.value.value}"
            )
            yield f"another {keyword.arg}", other


def ordered(dim: str) -> str:
    """The dim with its axes as types have them."""
    name, *axes = dim.split("/")
    return "/".join(
        [name, *sorted(axes, key=lambda axis: (axis not in AXES, AXES.find(axis), axis))]
    )


def changed_type(spec: str, axes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(what is wrong, the shape after it): an axis shards another dim, or none."""
    dims = spec.split()
    for i, dim in enumerate(dims):
        for axis in axes:
            without = f"{dim}/".replace(f"/{axis}/", "/", 1).rstrip("/")
            if without == dim:
                continue
            yield f"{dim.split('/')[0]} whole", " ".join([*dims[:i], without, *dims[i + 1 :]])
            for j, other in enumerate(dims):
                if j != i and not other[0].isdigit():
                    moved = [*dims]
                    moved[i], moved[j] = without, ordered(f"{other}/{axis}")
                    yield f"{axis} along {other.split('/')[0]}", " ".join(moved)


def changes(
    source: Source, function: ast.FunctionDef, axes: tuple[str, ...]
) -> Iterator[tuple[str, ast.expr, str]]:
    """(what is wrong, a node, the text in its place)."""
    signature = {id(node) for node in ast.walk(function.args)}
    for node in ast.walk(ast.Module([function.args, *function.body], [])):
        text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if text and id(node) in signature:
            yield from ((what, node, f'"{spec}"') for what, spec in changed_type(node.value, axes))
        elif text and node.value in axes:
            yield from (
                (f"{axis} for {node.value}", node, f'"{axis}"')
                for axis in axes
                if axis != node.value
            )
        elif isinstance(node, ast.Call):
            yield from ((what, node, f"({after})") for what, after in changed_call(source.of, node))
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            sign = COMPARISONS[type(node.ops[0])]
            yield (
                f"{sign} in a mask",
                node,
                f"{source.of(node.left)} {sign} {source.of(node.comparators[0])}",
            )
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            yield (
                "either end of a mask",
                node,
                f"({source.of(node.left)} | {source.of(node.right)})",
            )


def mutants_of(program: Program, wanted: set[str] | None = None) -> Iterator[Program]:
    """The program with each single change, or with those of the names `wanted`.

    Its place in the file stays.
    """
    lines, start = inspect.getsourcelines(program.body)
    source = Source("\n" * (start - 1) + "".join(lines))
    for i, (what, node, after) in enumerate(changes(source, source.tree.body[0], program.axes)):
        name = f"{program.name}: {what} ({i})"
        if wanted is not None and name not in wanted:
            continue
        tree = ast.parse(source.mutant(what, node, after).source)
        tree.body[0].decorator_list = []
        names = dict(inspect.unwrap(program.body).__globals__)
        exec(compile(tree, inspect.getsourcefile(program.body), "exec"), names)
        body = names[tree.body[0].name]
        ins = inspect.get_annotations(body)
        outs = ins.pop("return")
        yield dataclasses.replace(
            program, name=name, body=body, ins=ins, outs=outs, whole=one_device, vma=False
        )


def all_mutants(wanted: set[str] | None = None) -> list[Program]:
    """Those of the programs of two files, which may also be right, or no programs at all."""
    files = {right.__name__, methods.__name__}
    programs = [program for program in RIGHT if program.body.__module__ in files]
    return [mutant for program in programs for mutant in mutants_of(program, wanted)]


def differs(program: Program) -> bool:
    """Whether it runs, and gives something else on some mesh than on one device."""
    try:
        meant = run(program, (1,) * len(program.axes))
        return any(distance(run(program, sizes), meant) > DIFFERENT for sizes in program.meshes)
    except Exception:  # of JAX, numpy or a type: it is no program
        return False


def text_of(names: list[str]) -> str:
    """A line for each right program, with what is changed in it."""
    found = collections.defaultdict(list)
    for name in names:
        right, _, change = name.partition(": ")
        found[right].append(change)
    return "".join(f"{right}: {', '.join(changes)}\n" for right, changes in found.items())


def names_in(text: str) -> list[str]:
    lines = (line.split(": ", 1) for line in text.splitlines())
    return [f"{right}: {change}" for right, changes in lines for change in changes.split(", ")]


NAMES = {*names_in(MUTANTS.read_text())}
PROGRAMS = all_mutants(NAMES)

if __name__ == "__main__":
    MUTANTS.write_text(text_of([mutant.name for mutant in all_mutants() if differs(mutant)]))
