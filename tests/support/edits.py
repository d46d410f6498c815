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

from shardlib.testing import sizes_of
from shardwright.cluster.devices import explicit_mesh
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
        used = [node for node in ast.walk(ast.parse(self.put)) if isinstance(node, ast.Name)]
        put = replaced(self.put, [(node, names.get(node.id, node.id)) for node in used])
        found = text[begin:end]
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
    wanted = [pattern[0].value] if is_expression else pattern
    is_it = _regex_of(wanted, local)
    for node in ast.walk(scope):
        blocks = (getattr(node, name, None) for name in ("body", "orelse", "finalbody"))
        for block in [[node]] if is_expression else blocks:
            for first in range(len(block) if isinstance(block, list) else 0):
                nodes = block[first : first + len(wanted)]
                if [*map(type, nodes)] == [*map(type, wanted)]:
                    match = is_it.fullmatch(_dumped(nodes))
                    if match and len({*match.groupdict().values()}) == len(match.groupdict()):
                        yield nodes, match.groupdict()


def _dumped(nodes: Sequence[ast.AST]) -> str:
    return re.sub(r", ctx=\w+\(\)", "", " ".join(map(ast.dump, nodes)))


def _regex_of(pattern: Sequence[ast.AST], local: set[str]) -> re.Pattern[str]:
    """Matches a dump of nodes. `...` is anything, as the last argument of a call also several; a
    name is itself or that of a local variable, in a group of the name.
    """
    text = _dumped(pattern).replace("Constant(value=Ellipsis)", "…")
    text = re.escape(re.sub(r"(, )?…\], keywords=\[\]", "…", text)).replace("…", ".*")
    seen: set[str] = set()

    def group(found: re.Match[str]) -> str:
        kind, name = found.groups()
        value = f"(?P={name})" if name in seen else f"(?P<{name}>{'|'.join({*local, name})})"
        seen.add(name)
        return f"{kind}='{value}'"

    return re.compile(re.sub(r"\b(Name\\\(id|arg\\\(arg)='(\w+)'", group, text), re.DOTALL)


def position(text: str, node: ast.AST, first: bool) -> int:
    """Index of the first character of a node in a text, or of the one after its last."""
    if first and getattr(node, "decorator_list", []):
        return position(text, node.decorator_list[0], first) - 1  # its @
    line, column = (
        (node.lineno, node.col_offset) if first else (node.end_lineno, node.end_col_offset)
    )
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


def replaced(text: str, changes: Sequence[tuple[ast.AST, str]]) -> str:
    """The text with other texts of some nodes."""
    places = [(*(position(text, x, first=y) for y in (True, False)), new) for x, new in changes]
    for begin, end, new in sorted(places, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


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
    others = dict(table)
    file = {"file": others.pop("file", "train.py")}

    def change_of(within: str, find: str, put: str) -> Change:
        return Change(find, put, within, **file)

    changes = [Change(**file | DATA["changes"][name]) for name in others.pop("uses", ())]
    changes += [change_of(*given) for given in others.pop("change", ())]
    own = {name: others.pop(name) for name in ("find", "put", "within") if name in others}
    changes += [Change(**own, **file)] * bool(own)
    config = others.pop("config", "demo")
    if "fix" in others:
        others["fix"] = change_of(*others["fix"])
    return Edit(id, tuple(changes), (config,) if isinstance(config, str) else (*config,), **others)


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
    mesh = explicit_mesh(sizes_of(config["mesh"]))
    return load(config["name"], *config.get("overrides", ())), mesh


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
