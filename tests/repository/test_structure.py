"""The architecture that the map in docs/architecture.md shows: rooms, floors, imports that point
down.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
FLOORS = [
    ("train",),
    ("shardwright.__main__",),
    ("bench",),
    ("shardwright.tools", "shardwright.testing"),
    ("shardwright.models.delta", "shardwright.models.mla"),
    ("shardwright.models.moe",),
    ("shardwright.models.family", "shardwright.models.gpt2"),
    ("shardwright.models",),
    ("shardwright.sampling", "shardwright.huggingface"),
    ("shardwright.run",),
    ("shardwright.inspect",),
    ("shardwright.program",),
    ("shardwright.optimizers",),
    ("shardwright.modeling",),
    ("shardwright.cluster",),
    ("shardwright.settings",),
    ("shardwright",),
    ("shardwright.data.loader",),
    ("shardwright.data.text",),
    ("shardwright.data.flat_tokens",),
    ("shardwright.data",),
    ("shardwright.jax_extra",),
    ("shardlib.pytest_plugin",),
    ("shardlib.testing",),
    ("shardlib.exact",),
    ("shardlib",),
]
"""Rooms from the top of the house to its ground floor. A module imports those of its own room and
of floors below."""
FLOOR = {room: height for height, rooms in enumerate(reversed(FLOORS)) for room in rooms}
TOP = list(dict.fromkeys(room.partition(".")[0] for floor in FLOORS for room in floor))
PROGRAMS = ("shardwright.tools", "bench")
LATE = {"shardlib.pytest_plugin", "shardwright.__main__"}
"""Modules that import others when used: before a conftest.py sets JAX's flags, or where packages
are missing."""
SHARED = {
    f"shardwright.tools.report.{name}"
    for name in ("comparing", "page", "pairs", "plots", "reading", "screen")
}
SHARED |= {f"bench.{name}" for name in ("common", "throughput.peers.ours", "throughput.peers.job")}
SHARED.add("shardwright.tools.ladder.scales")
"""Modules of several programs."""
RUN_TESTS = {"bench.faults", "bench.free_train"}
"""Programs that run tests, and so import what these have in common."""


@functools.cache
def modules() -> dict[str, Path]:
    """The source of each module outside of tests, by name; a package by its __init__.py."""
    paths = [*ROOT.glob("*.py"), *(path for top in TOP for path in (ROOT / top).rglob("*.py"))]
    paths = [path for path in paths if not path.is_symlink() and "template" not in path.parts]

    def name(path):
        return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    return {name(path): path for path in paths}


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


@functools.cache
def imports(name: str) -> list[tuple[str, bool]]:
    """Each module of the project that `name` imports, and whether it does so inside a function."""
    package = name if modules()[name].name == "__init__.py" else name.rpartition(".")[0]

    def found(node: ast.AST, in_function: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from ((f"{base}.{alias.name}", in_function) for alias in node.names)
        else:
            in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from found(child, in_function)

    result = []
    for imported, in_function in found(tree(name), False):
        top = imported.partition(".")[0]
        assert top != "tests" or name in RUN_TESTS, f"{name} imports {imported}"
        if top in TOP:
            target = imported if imported in modules() else imported.rpartition(".")[0]
            result.append((target, in_function))
    return result


def room(name: str) -> str:
    """The room of a module: the longest that its name begins with."""
    return max((room for room in FLOOR if f"{name}.".startswith(f"{room}.")), key=len)


def program(name: str) -> str:
    """The program in shardwright/tools or bench that a module is part of: a file, or a folder."""
    return ".".join(name.split(".")[: len(room(name).split(".")) + 1])


def test_every_module_is_in_a_room():
    top = {path.parent for path in ROOT.glob("*/*.py")} | {*ROOT.glob("*.py")}
    names = {path.stem for path in top if not path.is_symlink()}
    assert names - {"tests"} == set(TOP)


def check_module(name: str) -> None:
    for target, in_function in imports(name):
        said = f"{name} imports {target}"
        assert target in modules(), f"{said}, which is no module"
        is_same = room(target) == room(name)
        assert is_same or FLOOR[room(target)] < FLOOR[room(name)], f"{said}, not on a floor below"
        assert not in_function or name in LATE, f"{said} inside a function"
        if room(target) in PROGRAMS and target not in SHARED:
            assert program(target) == program(name), f"{said}, part of another program"


def test_modules_import_what_is_below_them():
    for name in modules():
        check_module(name)
