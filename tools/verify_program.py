"""The program to verify, as its files stand on disk: a copy in which tools/verify can look into the forward pass.

The copy has the same lines as the original. Changed in it are `lax.scan` and `shardops.einsum_unreduced`, which become
those of tools/verify_record.py, and, where f64 is asked for, each f32 and float32.
"""

import ast
import importlib.util
import shutil
from pathlib import Path

RECORDED = {("lax", "scan"): "verify_scan", ("shardops", "einsum_unreduced"): "verify_einsum"}
IMPORT = "from tools.verify_record import einsum as verify_einsum, scan as verify_scan; "


def rewritten(source: str, double: bool) -> str:
    """The source of a module with the calls that are recorded exchanged; if `double`, with f64 for f32 too.

    No line moves. Raises SyntaxError for what Python cannot read.
    """
    tree = ast.parse(source)
    edits: list[tuple[int, int, int, str]] = []  # line, from, to (in bytes of UTF-8), text

    def replace(node, text: str, first: int | None = None) -> None:
        start = node.end_col_offset - first if first is not None else node.col_offset
        edits.append((node.end_lineno, start, node.end_col_offset, text))

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            of = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (of, node.attr) in RECORDED and node.lineno == node.end_lineno:
                replace(node, RECORDED[of, node.attr])
            elif double and node.attr == "float32":
                replace(node, "float64", len("float32"))
            elif double and node.attr == "f32" and of in ("shardtypes", "array_types"):
                replace(node, "f64", len("f32"))
        elif double and isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardlib"):
            for alias in node.names:
                if alias.name == "f32":
                    replace(alias, f"f64 as {alias.asname or 'f32'}")
        elif double and isinstance(node, ast.Constant) and node.value == "float32":
            replace(node, '"float64"')
    if any(text in RECORDED.values() for *_, text in edits):
        first = next(n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom) and not _is_future(n))
        edits.append((first.lineno, first.col_offset, first.col_offset, IMPORT))

    lines = source.encode().splitlines(keepends=True)
    for line, start, end, text in sorted(edits, reverse=True):
        lines[line - 1] = lines[line - 1][:start] + text.encode() + lines[line - 1][end:]
    return b"".join(lines).decode()


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def find_sources(*modules: str) -> dict[str, Path]:
    """The files of `modules`, and of the plain modules beside them that they import: {name: path}.

    Packages (shardlib, tools and the like) are left out: they are used as they are. Raises ValueError for a module
    that is not found, or is a package.
    """
    found: dict[str, Path] = {}
    queue = []
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py") or "." in name:
            raise ValueError(f"{name} is no module in a file of its own that Python finds: there is nothing to verify.")
        queue.append((name, Path(spec.origin)))
    directories = {path.parent for _, path in queue}
    while queue:
        name, path = queue.pop()
        if name in found:
            continue
        found[name] = path
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            beside = [(n, directory / f"{n}.py") for n in imported for directory in sorted(directories)]
            queue += [(n, file) for n, file in beside if file.exists()]
    return found


def write_copy(sources: dict[str, Path], directory: Path, double: bool) -> None:
    """The modules `sources`, rewritten, in `directory`."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, path in sources.items():
        (directory / f"{name}.py").write_text(rewritten(path.read_text(), double))
