"""Where in the source a tensor is: the name and the line that a report gives it."""

import ast
import functools
import inspect
from pathlib import Path

from tools.verify.record import Site


@functools.cache
def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text())


@functools.cache
def name_of_site(site: Site) -> str:
    """`layer.v`: the function around a `save_for_backward`, and what its result is assigned to, if anything."""
    around = [node for node in ast.walk(_tree(site.file)) if _holds(node, site.line)]
    functions = [node.name for node in around if isinstance(node, ast.FunctionDef)]
    targets = []
    for node in around:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            first = node.targets[0] if isinstance(node, ast.Assign) else node.target
            targets.append(ast.unparse(first))
    return ".".join([*functions[-1:], *targets[-1:]]) or "saved"


def _holds(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno


def line_of_field(weights, path: str) -> tuple[str, int]:
    """File and line of the field that `path`, such as `layers.w_q`, names in the dataclass `weights`."""
    *outer, name = path.split(".")
    owner = type(functools.reduce(getattr, outer, weights))
    file, (lines, first) = inspect.getsourcefile(owner), inspect.getsourcelines(owner)
    (cls,) = [n for n in ast.walk(_tree(file)) if isinstance(n, ast.ClassDef) and _spans(n, first, len(lines))]
    fields = [n.lineno for n in cls.body if isinstance(n, ast.AnnAssign) and n.target.id == name]
    return file, fields[0] if fields else first


def _spans(node: ast.ClassDef, first: int, count: int) -> bool:
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return start == first and node.end_lineno == first + count - 1


def line_of_function(fn) -> tuple[str, int]:
    """File and line of the `def` of `fn`."""
    fn = inspect.unwrap(fn)
    return fn.__code__.co_filename, fn.__code__.co_firstlineno
