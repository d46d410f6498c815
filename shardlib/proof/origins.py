"""Names the lines of users' files that led to an equation, for messages.

JAX records the calls that led to each equation. Where two programs differ because of a branch on a
size, this module reads the sources to name the branch, and the line that gave the size its name.
"""

import ast
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from shardlib import layers
from shardlib.equations import Eqn, body_of, frames_of
from shardlib.interpret import Domain, Operation, interpret
from shardlib.places import is_users, shown_path

SHOWN = 8
"""Largest number of calls that a message shows."""
Line = tuple[str, int]  # a file, and the number of a line


def is_helper(file: str) -> bool:
    """Returns True if a file is in a package, of another name than `models`.

    Its lines are those of helper functions, so messages name the lines that call them instead.
    """
    folder = Path(file).parent
    return folder.name != "models" and (folder / "__init__.py").exists()


def callers_text(eqn: Any, within: str | None = None) -> str:
    """Names the lines of users' files that called the line of an equation, innermost first.

    For example, `called from family.py:231, 208; train.py:317`. Leaves out the calls around the
    equation's layer, and files in packages. With `within`, a file, names only its innermost two
    lines. Returns "" if no line is left.
    """
    frames = frames_of(eqn)
    start = next((i for i, (file, _) in enumerate(frames) if file == layers.__file__), 0)
    users = dict.fromkeys([frame for frame in frames[start:] if is_users(frame[0])][-2::-1])
    callers = [frame for frame in users if not is_helper(frame[0])][:SHOWN]
    callers = [frame for frame in callers if within in (None, frame[0])][: 2 if within else None]
    of_files = itertools.groupby(callers, key=lambda frame: frame[0])
    texts = [
        f"{shown_path(file)}:{', '.join(str(line) for _, line in lines)}"
        for file, lines in of_files
    ]
    return f"called from {'; '.join(texts)}" if texts else ""


class _Uses(Domain[bool]):
    """Finds the first equation that computes with an array. The fact is True for the array."""

    def __init__(self, array: object):
        self._array = array
        self.found: Operation | None = None

    def constant(self, x: object) -> bool:
        return x is self._array

    def apply(self, op: Operation, ins: list[bool]) -> list[bool]:
        if self.found is None and any(ins):
            self.found = op
        return [False] * len(op.eqn.outvars)

    def join(self, op: Operation, a: bool, b: bool) -> bool:
        return a or b


def use_of(array: object, program: Any) -> Operation | None:
    """Returns the first equation that computes with `array`, a constant of a traced program.

    Returns None if there is none.
    """
    uses = _Uses(array)
    interpret(program, uses, [False] * len(body_of(program)[0].invars))
    return uses.found


def choice_between(here: Eqn | None, there: Eqn | None) -> str:
    """Names the `if` or `while` by which one program has `here` and the other `there`; else "".

    For example, "by the choice moe.py:384, `slots is None`, of moe.py:383": line 384 has the test,
    and line 383 assigns a name that the test uses.
    """
    ours, theirs = (
        [f for f in frames_of(eqn) if is_users(f[0])] if eqn else [] for eqn in (here, there)
    )
    pairs = itertools.zip_longest(ours, theirs)
    parted = [*itertools.dropwhile(lambda pair: pair[0] == pair[1], pairs)]
    one_sided = [pair for a, b in parted[1:] for pair in ((a, None), (None, b))]
    return next(filter(None, (_choice(*pair) for pair in [*parted[:1], *one_sided])), "")


def _holds(branch: Sequence[ast.stmt | ast.expr], line: int | None) -> bool:
    """Returns True if a line is within one of the statements of a branch."""
    return line is not None and any(_is_at(node, line) for node in branch)


def _choice(here: Line | None, there: Line | None) -> str:
    """Names an `if` or `while` on a size that has only one of two lines in a branch; else ""."""
    files = {frame[0] for frame in (here, there) if frame}
    lines = [x and x[1] for x in (here, there)]
    if len(files) != 1:
        return ""
    (file,) = files
    nodes = sorted(
        (n for n in ast.walk(_tree(file)) if isinstance(n, _CHOICES)), key=lambda n: -n.lineno
    )
    for node in nodes:
        branches = [part if isinstance(part, list) else [part] for part in (node.body, node.orelse)]
        is_parted = any(len({_holds(branch, line) for line in lines}) == 2 for branch in branches)
        if is_parted and _is_of_size(file, node.test, node.lineno):
            made = max(
                (n.lineno for n in _assignments(file, node.lineno, _names(node.test))), default=None
            )
            of = f", of {shown_path(file)}:{made}" if made else ""
            return f"by the choice {shown_path(file)}:{node.lineno}, `{ast.unparse(node.test)}`{of}"
    return ""


_CHOICES = ast.If | ast.IfExp | ast.While


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.AST:
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def size_text(frames: Iterable[Line]) -> str:
    """Names the line where a size gets a name, such as `of a size at moe.py:383`; or returns "".

    A size is that of an array on this device, or a number of devices. Follows the calls `frames`
    from the innermost outwards. The first call that uses a name of a size, assigned earlier in the
    same function, gives the line: that of the assignment. A call that reads a size itself gives "".
    """
    for file, line in reversed([frame for frame in frames if is_users(frame[0])]):
        here = [n for n in ast.walk(_tree(file)) if _is_simple(n) and _is_at(n, line)]
        if not here or _SIZE.search(ast.unparse(here[-1])):
            return ""
        made = [
            n for n in _assignments(file, line, _names(here[-1])) if _SIZE.search(ast.unparse(n))
        ]
        if made:
            return f"of a size at {shown_path(file)}:{made[-1].lineno}"
    return ""


_SIZE = re.compile(
    r"\.(shape|size)\b(?!\()|\blen\(|axis_size\(|planned_devices\(|has_stages\(|mesh_axes\("
)


def _is_of_size(file: str, node: ast.AST, line: int) -> bool:
    """Returns True if an expression depends on a size, itself or by names assigned before `line`.

    Other expressions, such as flags, have the same value on every mesh.
    """
    made = _assignments(file, line, _names(node))
    return bool(_SIZE.search(ast.unparse(node))) or any(
        _is_of_size(file, n, n.lineno) for n in made
    )


def _is_simple(node: ast.AST) -> TypeGuard[ast.stmt]:
    """Returns True if a node is a statement without statements inside."""
    return isinstance(node, ast.stmt) and not hasattr(node, "body")


def _is_at(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _assignments(file: str, line: int, names: set[str]) -> Iterator[ast.stmt]:
    """Yields statements before a line, in the same function, that assign one of the names."""
    functions = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.FunctionDef))
    around = [node for node in functions if _is_at(node, line)]
    for node in ast.walk(max(around, key=lambda node: node.lineno)) if around else ():
        stored = (
            x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
        )
        if _is_simple(node) and node.lineno < line and names & {*stored}:
            yield node
