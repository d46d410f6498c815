"""The architecture that the map in docs/architecture.md shows: rooms, floors, imports that point
down.
"""

import ast
import functools
import re
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
BY_NAME = {
    "bench.other_trainers",
    "bench.plan.trainers",
    "bench.throughput.peers.seqax_trainer",
    "bench.throughput.peers.worker",
    "shardlib.parsing",
    "shardwright.__main__",
    "shardwright.inspect.fresh",
    "shardwright.modeling.model",
    "shardwright.program.spec",
    "shardwright.program.trackers",
    "shardwright.run.sweeps",
    "shardwright.settings.starting",
}
"""Modules that import what a configuration, a command line, a pickled function, or a list of
programs names."""
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
READ_STEPS = ("shardwright.run.listeners.profile", "shardwright.run.listeners.standard")
"""Listeners that analyze the step."""


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
    calls = {ast.unparse(node.func) for node in ast.walk(tree(name)) if isinstance(node, ast.Call)}
    ways = ("import_module", "__import__", "run_module")
    found = [call for call in calls if call.rpartition(".")[2] in ways]
    assert not found or name in BY_NAME, f"{name} imports by {', '.join(found)}"


def test_modules_import_what_is_below_them():
    for name in modules():
        check_module(name)


def test_what_reads_a_step_is_reached_by_one_module():
    """A run imports that module. The others of the room change without it."""
    for name in modules():
        if name == "train" or name.startswith("shardwright.run."):
            found = {target for target, _ in imports(name) if room(target) == "shardwright.inspect"}
            is_run = name in ("shardwright.run.run", *READ_STEPS)
            assert found <= ({"shardwright.inspect.examine"} if is_run else set()), name
            assert '"shardwright.inspect' not in modules()[name].read_text(), name


def hand_loops(name: str) -> list[int]:
    """The lines of loops over equations, from any list, that go from their operands to their
    results.
    """
    found = []
    kinds = ast.For | ast.While | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    for loop in ast.walk(tree(name)):
        if isinstance(loop, kinds):
            inside = [*ast.walk(loop)]
            own = {x.id for x in inside if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
            parts = [ast.unparse(x).split(".") for x in inside if isinstance(x, ast.Attribute)]
            read = {part[-1] for part in parts if part[0] in own}
            of_results = isinstance(loop, ast.DictComp) and any(
                ast.unparse(x.iter).endswith(".outvars") for x in loop.generators
            )
            if {"invars", "outvars"} <= read or of_results:
                found.append(loop.lineno)
    return found


def test_one_module_goes_through_the_equations_of_a_jaxpr():
    """No other reads them off a jaxpr, or keeps what it knows of their operands and results."""
    readers = [
        name
        for name in modules()
        if any(getattr(node, "attr", "") == "eqns" for node in ast.walk(tree(name)))
    ]
    assert readers == ["shardlib.interpret"]
    assert [name for name in modules() if hand_loops(name)] == ["shardlib.interpret"]


def test_there_is_no_circle():
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' → '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for target, _ in imports(name):
                # `from package import module` runs the package's __init__ too, which then is on the
                # way already.
                is_package = modules()[target].name == "__init__.py"
                if not (is_package and f"{name}.".startswith(f"{target}.")):
                    visit(target, (*path, name))
            done.add(name)

    for name in modules():
        visit(name, ())


def test_the_map_has_a_line_for_each_entry():
    text = (ROOT / "docs/architecture.md").read_text()
    block = text[text.index("## The map") :].split("```")[1]
    shown = re.findall(r"^([\w.]+)/?\s+\S", block, re.MULTILINE)
    names = [name.removesuffix(".py") for name in shown]
    assert [name for name in names if name in TOP] == TOP
    written = {"runs", "outputs", "multirun", "data", "build", "dist", "__pycache__"}
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.is_symlink()]
    folders = {path.name for path in folders if not path.name.startswith(".")} - written
    assert {name for name in folders if not name.endswith(".egg-info")} <= {*shown}
