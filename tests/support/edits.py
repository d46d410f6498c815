"""The edits of tests/edits/edits.toml: finds their places in the source, and asks what rejects
them.

    python -m tests.support.edits [words]       makes all, or those with such names
"""

import ast
import contextlib
import copy
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import AbstractMesh, AxisType

from shardwright.inspect.soundness import examine
from shardwright.modeling.model import load_model
from shardwright.program.step import NAMES, Step, trace_step
from shardwright.tools.verify import small
from tests.support.recipes import ROOT, train_with
from tests.support.shipped import load

FILE = ROOT / "tests" / "edits" / "edits.toml"
FAULTS = FILE.with_name("faults.toml")
DEVICES = 8
"""The sizes of a model are those that `tools.verify` takes for so many devices."""
SCOPES = ast.FunctionDef, ast.ClassDef


# ---- an edit of a text ---------------------------------------------------------------------------


class Gone(AssertionError):
    """The source no longer has the place of an edit."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Puts a text in place of an expression, or of statements, up to the names of local
    variables.
    """

    find: str = ""
    put: str = ""
    within: str = ""
    """The function or class that has it, such as `Llama.layer`; empty: the whole file."""
    file: str = "train.py"

    def apply(self, text: str) -> str:
        """The text of the file after the change.

        Without `find`, the new text is put at its end. Raises Gone without its place.
        """
        if not self.find:
            return f"{text}\n\n{self.put}"
        nodes, names = self.place(text)
        begin, end = position(text, nodes[0], first=True), position(text, nodes[-1], first=False)
        found, put = text[begin:end], self._renamed(names)
        if isinstance(nodes[0], ast.expr):
            put = f"({put.replace('FOUND', f'({found})').strip()})"
        else:
            indent = " " * nodes[0].col_offset
            put = put.replace("FOUND", found.replace(f"\n{indent}", "\n"))
            put = put.replace("\n", f"\n{indent}")
        return text[:begin] + put + text[end:]

    def place(self, text: str) -> tuple[list[ast.AST], dict[str, str]]:
        """The nodes that `find` matches, and the names of local variables there, by those in it.

        Of several places, it is the one with these very names.
        """
        scope = self.scope(tree_of(text))
        local = bound_in(scope) if isinstance(scope, ast.FunctionDef) else set()
        found = [*_matches(ast.parse(textwrap.dedent(self.find)).body, scope, local)]
        best = [match for match in found if all(x == y for x, y in match[1].items())] or found
        if len(best) != 1:
            where = self.within or "the file"
            raise Gone(f"{where} in {self.file} has {len(best)} times: {self.find}")
        return best[0]

    def scope(self, tree: ast.Module) -> ast.AST:
        scope: ast.AST = tree
        for name in filter(None, self.within.split(".")):
            found = [x for x in ast.walk(scope) if isinstance(x, SCOPES) and x.name == name]
            if len(found) != 1:
                raise Gone(f"{self.file} has {len(found)} times {self.within}")
            (scope,) = found
        return scope

    def _renamed(self, names: Mapping[str, str]) -> str:
        """`put` with the names of local variables that the source has."""
        used = [node for node in ast.walk(ast.parse(self.put)) if isinstance(node, ast.Name)]
        put = self.put
        for node in sorted(used, key=lambda x: (x.lineno, x.col_offset), reverse=True):
            begin = position(put, node, first=True)
            put = put[:begin] + names.get(node.id, node.id) + put[begin + len(node.id) :]
        return put


def place_of(within: str, find: str) -> tuple[str, int]:
    """The place of an expression in train.py: the function and the variable to which the statement
    assigns it, as points of statistics are called, and the number of its first line.
    """
    text = (ROOT / "train.py").read_text()
    change = Change(find, within=within)
    (node,), _ = change.place(text)
    line = node.lineno
    for statement in ast.walk(change.scope(tree_of(text))):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and node in ast.walk(statement):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            return f"{within} {ast.unparse(target)}", statement.lineno
    return within, line


def saved_in(within: str) -> dict[str, int]:
    """The variables of a function of train.py that are saved_for_backward, as points of statistics
    are called, with the numbers of their lines.
    """
    function = Change(within=within).scope(tree_of((ROOT / "train.py").read_text()))
    assigned = (x for x in ast.walk(function) if isinstance(x, ast.Assign))
    calls = ((x, x.value) for x in assigned if isinstance(x.value, ast.Call))
    return {
        f"{within} {ast.unparse(x.targets[0])}": x.lineno
        for x, call in calls
        if ast.unparse(call.func) == "save_for_backward" and not call.keywords
    }


@functools.cache
def tree_of(text: str) -> ast.Module:
    return ast.parse(text)


def bound_in(scope: ast.AST) -> set[str]:
    """Names that are assigned to or imported, arguments and functions in a scope."""
    nodes = [*ast.walk(scope)]
    imported = (x for x in nodes if isinstance(x, ast.alias))
    found = {(x.asname or x.name).partition(".")[0] for x in imported}
    found |= {x.arg for x in nodes if isinstance(x, ast.arg)}
    found |= {x.name for x in nodes if isinstance(x, SCOPES) and x is not scope}
    return found | {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}


def _matches(
    pattern: list[ast.stmt], scope: ast.AST, local: set[str]
) -> Iterator[tuple[list[ast.AST], dict[str, str]]]:
    """The nodes in a scope that a pattern matches, and the names there by those of the pattern."""
    is_expression = len(pattern) == 1 and isinstance(pattern[0], ast.Expr)
    for node in ast.walk(scope):
        if is_expression:
            candidates = [[node]]
        else:
            blocks = (getattr(node, name, None) for name in ("body", "orelse", "finalbody"))
            candidates = [
                block[i : i + len(pattern)]
                for block in blocks
                if isinstance(block, list)
                for i in range(len(block) - len(pattern) + 1)
            ]
        for nodes in candidates:
            names: dict[str, str] = {}
            wanted, given = (pattern[0].value, node) if is_expression else (pattern, nodes)
            if same(wanted, given, local, names) and len({*names.values()}) == len(names):
                yield nodes, names


def same(pattern: object, node: object, local: set[str], names: dict[str, str]) -> bool:
    """True if a node has the tree of the pattern, in which `...` is any expression, or the last
    arguments of a call. `names` gets the names of local variables.
    """
    if isinstance(pattern, ast.Constant) and pattern.value is ...:
        return isinstance(node, ast.expr)
    if isinstance(pattern, list):
        return (
            isinstance(node, list)
            and len(pattern) == len(node)
            and all(same(a, b, local, names) for a, b in zip(pattern, node, strict=True))
        )
    if not isinstance(pattern, ast.AST):
        return repr(pattern) == repr(node)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Name | ast.arg):
        field = "id" if isinstance(pattern, ast.Name) else "arg"
        mine, other = getattr(pattern, field), getattr(node, field)
        return names.setdefault(mine, other) == other if other in local else mine == other
    fields = [name for name in pattern._fields if name != "ctx"]
    if isinstance(pattern, ast.Call) and pattern.args and ast.unparse(pattern.args[-1]) == "...":
        first = len(pattern.args) - 1
        return same(pattern.func, node.func, local, names) and same(
            pattern.args[:first], node.args[:first], local, names
        )
    return all(same(getattr(pattern, x), getattr(node, x), local, names) for x in fields)


def position(text: str, node: ast.AST, first: bool) -> int:
    """Index of the first character of a node in a text, or of the one after its last."""
    if first and getattr(node, "decorator_list", []):
        return position(text, node.decorator_list[0], first) - 1  # its @
    line, column = (
        (node.lineno, node.col_offset) if first else (node.end_lineno, node.end_col_offset)
    )
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


# ---- the edits -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Edit:
    """An edit of the source, and what catches it. The head of edits.toml explains the fields."""

    id: str
    changes: tuple[Change, ...]
    config: tuple[str, ...]
    type: str = ""
    exact: str = ""
    test: str = ""
    bug: str = ""
    kind: str = ""
    here: str = ""
    why: str = ""
    spmd: str = ""
    session: int = 0
    check: str = ""
    same: bool = False
    fix: Change | None = None

    def __str__(self) -> str:
        return self.id

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """The edited files, by their paths. Raises Gone if the source lacks a place."""
        texts: dict[str, str] = {}
        for change in self.changes:
            text = texts.get(change.file) or (ROOT / change.file).read_text()
            texts[change.file] = change.apply(text)
        return texts

    @functools.cached_property
    def lines(self) -> dict[str, set[int]]:
        """Numbers of the lines that the edited files have and the source lacks, by file."""
        found = {}
        for file, text in self.files.items():
            before = {*(ROOT / file).read_text().splitlines()}
            found[file] = {i for i, line in enumerate(text.splitlines(), 1) if line not in before}
        return found


GATES = ("type", "exact", "test")
"""What may catch an edit, soonest first."""
DATA = tomllib.loads(FILE.read_text())
CONFIGS = DATA["configs"]


def edit_of(id: str, table: dict) -> Edit:
    """An edit from its table, in which the fields of a single change stand themselves."""
    names = {field.name for field in dataclasses.fields(Change)}
    file = {"file": table["file"]} if "file" in table else {}

    def change_of(given: list[str]) -> Change:
        return Change(**dict(zip(("within", "find", "put"), given, strict=True)), **file)

    changes = [Change(**(file | DATA["changes"][name])) for name in table.get("uses", ())]
    changes += map(change_of, table.get("change", ()))
    changes += [Change(**{name: table[name] for name in names & table.keys()})] * ("put" in table)
    config = table.get("config", "demo")
    others = {
        name: x
        for name, x in table.items()
        if name not in {*names, "uses", "change", "config", "fix"}
    }
    others |= {"fix": change_of(table["fix"])} if "fix" in table else {}
    return Edit(
        id, tuple(changes), (config,) if isinstance(config, str) else tuple(config), **others
    )


EDITS = {id: edit_of(id, table) for id, table in DATA["edit"].items()}
BUGS = [edit for edit in EDITS.values() if edit.bug]
"""Those that other frameworks have published."""


def catcher(edit: Edit) -> str:
    """What catches a bug, of GATES; empty if there is no edit."""
    return next((gate for gate in GATES if getattr(edit, gate)), "")


def faults() -> list[Edit]:
    """The edits of faults.toml, whose names are the file and the function."""
    found = []
    for id, table in tomllib.loads(FAULTS.read_text())["fault"].items():
        file, _, within = id.partition("::")
        found.append(edit_of(id, table | {"file": file, "within": within}))
    return found


# ---- tests ---------------------------------------------------------------------------------------


def copied(target: Path) -> Path:
    """Copies the repository."""
    skipped = shutil.ignore_patterns("__pycache__", ".*", "runs", "*.egg-info")
    return Path(shutil.copytree(ROOT, target, ignore=skipped, symlinks=True))


def run_tests(
    copy: Path,
    tests: Sequence[str],
    files: Mapping[str, str] | None = None,
    seconds: float | None = None,
    options: Sequence[str] = ("-x",),
) -> subprocess.CompletedProcess[str]:
    """Runs tests in a copy of the repository, with other texts of `files`, which it puts back."""
    before = {file: (copy / file).read_text() for file in files or {}}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for file, text in (files or {}).items():
            (copy / file).write_text(text)
        return subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds
        )
    finally:
        for file, text in before.items():
            (copy / file).write_text(text)


# ---- types and the check -------------------------------------------------------------------------


@functools.cache
def _composed(name: str) -> tuple:
    config = CONFIGS[name]
    return load(config["name"], *config.get("overrides", ())), mesh_of(config["mesh"])


def mesh_of(text: str) -> AbstractMesh:
    """A mesh such as `r=2 d=2 t=2`, without devices."""
    sizes = {axis: int(size) for axis, size in (word.split("=") for word in text.split())}
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes)
    )


@contextlib.contextmanager
def step_of(edit: Edit, name: str) -> Iterator[Step]:
    """The step of an edited source under one of its configurations, on a mesh without devices."""
    c, mesh = copy.deepcopy(_composed(name))
    c.mesh.p = mesh.shape.get("p", 1)
    small(c, DEVICES)
    for setting, value in CONFIGS[name].get("sizes", {}).items():
        section, _, field = setting.partition(".")
        setattr(getattr(c, section), field, value)
    with train_with(edit.files) as train, jax.sharding.use_abstract_mesh(mesh):
        for file in edit.files:
            if file.startswith("shardwright/models/"):
                c.model.module = f"changed_{Path(file).stem}"
        if c.model.module == "train":
            c.model.module = train.__name__
        yield trace_step(c, load_model(c.model), mesh, spec=train.SPEC)


def refusal(edit: Edit, name: str) -> tuple[str, str]:
    """What rejects an edit under a configuration, `type`, `exact` or nothing, and its first
    message.
    """
    try:
        with step_of(edit, name) as step:
            if edit.type:
                trace(step)
            try:
                text = first_finding(step)
            except Exception as error:
                trace(step)  # which raises if it is not the check that raised
                text = str(error)
            return ("exact" if text else ""), text
    except Exception as error:
        # of any class: JAX's own ShardingTypeError is none that can be named
        return "type", str(error)


def first_finding(step: Step) -> str:
    """What the check of a run's steps finds first, or cannot decide, by the program that shows it
    soonest.
    """
    verdicts = (examine(step, (name,)) for name in ("evaluation", "start", "training"))
    return next(
        (str(line) for found, undecided, *_ in verdicts for line in (*found, *undecided)), ""
    )


def trace(step: Step) -> None:
    """Traces the programs of a run, first those that take less time. Raises what the types do."""
    for name in reversed(NAMES):
        step.other(name=name).traced  # noqa: B018


def wrong_verdict(edit: Edit, config: str) -> str:
    """How the verdict on an edit differs from what edits.toml says; empty if it does not."""
    found, text = refusal(edit, config)
    gate = catcher(edit)
    expected = "" if gate == "test" else gate
    if found != expected:
        return f"rejected by {found or 'nothing'}, not by {expected or 'nothing'}: {text}"
    problem = ".*?".join(map(re.escape, getattr(edit, gate).split("…")))
    is_it = not expected or re.search(problem, text, re.DOTALL)
    return "" if is_it else f"another problem: {text}"


def main(words: Sequence[str]) -> int:
    """Makes the edits whose names have one of these words, by default all, and prints those that
    are not caught as edits.toml says. Returns their number.
    """
    count = 0
    with tempfile.TemporaryDirectory() as scratch:
        copy = copied(Path(scratch) / "copy")
        for edit in EDITS.values():
            if not edit.changes or edit.session or not any(word in edit.id for word in words):
                continue
            try:
                wrong = [wrong_verdict(edit, config) for config in edit.config]
            except Gone as error:
                wrong = [f"no place: {error}"]
            if edit.test and not any(wrong):
                done = run_tests(copy, [edit.test], edit.files)
                wrong += [] if done.returncode == 1 else [f"{edit.test} does not fail"]
            count += any(wrong)
            print(edit, *filter(None, wrong), "" if any(wrong) else "caught", sep=": ", flush=True)
    return count


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:] or [""])))
