"""The program to verify, as its files stand on disk: a copy in which tools/verify can look into the forward pass.

The copy has the same lines as the original. Changed in it are `lax.scan` and `shardops.einsum_unreduced`, which become
those of tools/verify_record.py, and, where f64 is asked for, each f32 and float32.
"""

import ast
import importlib.util
import shutil
import sys
import sysconfig
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
        elif double and _is_random_bits(node):  # whose default would become u64
            edits.append((node.end_lineno, node.end_col_offset - 1, node.end_col_offset - 1, ', dtype="uint32"'))
    if any(text in RECORDED.values() for *_, text in edits):
        first = next(n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom) and not _is_future(n))
        edits.append((first.lineno, first.col_offset, first.col_offset, IMPORT))

    lines = source.encode().splitlines(keepends=True)
    for line, start, end, text in sorted(edits, reverse=True):
        lines[line - 1] = lines[line - 1][:start] + text.encode() + lines[line - 1][end:]
    return b"".join(lines).decode()


def _is_random_bits(node: ast.AST) -> bool:
    """Whether it is a call of `random.bits` that leaves the dtype out."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "bits"
        and len(node.args) == 2
        and not any(keyword.arg == "dtype" for keyword in node.keywords)
    )


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def find_sources(*modules: str) -> dict[str, Path]:
    """The files of `modules`, and of the plain modules that they import, neither installed nor Python's own.

    Packages (shardlib, tools and the like) are left out: they are used as they are. Raises ValueError for one of
    `modules` that is not found, or is in a package.
    """
    found: dict[str, Path] = {}
    queue = list(modules)
    while queue:
        name = queue.pop()
        file = _own_file(name)
        if file is None and name in modules:
            raise ValueError(f"{name} is no module in a file of its own that Python finds: there is nothing to verify.")
        if file is None or name in found:
            continue
        found[name] = file
        for node in ast.walk(ast.parse(file.read_text(), str(file))):
            if isinstance(node, ast.Import):
                queue += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                queue.append(node.module)
    return found


def _own_file(name: str) -> Path | None:
    if "." in name or name in sys.stdlib_module_names:
        return None
    spec = importlib.util.find_spec(name)
    if spec is None or not (spec.origin or "").endswith(".py") or spec.submodule_search_locations is not None:
        return None
    installed = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")]
    file = Path(spec.origin).resolve()
    return None if any(file.is_relative_to(path.resolve()) for path in installed) else file


def write_copy(sources: dict[str, Path], directory: Path, double: bool) -> None:
    """The modules `sources`, rewritten, in `directory`."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, path in sources.items():
        (directory / f"{name}.py").write_text(rewritten(path.read_text(), double))
