"""A copy of the program to verify, from its files on disk, in which tools/verify can look into the forward pass.

The copy has the same lines as the original. It calls functions of tools/verify/record.py in place of those in RECORDED,
and in f64 has f64 for each f32 and float32.
"""

import ast
import importlib.util
import sys
import sysconfig
from pathlib import Path

RECORD = "verify_record"
"""Name of tools/verify/record.py in the copy."""
RECORDED = {
    ("lax", "scan"): f"{RECORD}.scan",
    ("shardops", "einsum_unreduced"): f"{RECORD}.einsum",
    ("jax_extra", "save_for_backward"): f"{RECORD}.save_for_backward",
    ("jax_extra", "explicit_activation_checkpointing"): f"{RECORD}.explicit_activation_checkpointing",
}
"""Replacement of `module.function`, and of `function` where it is imported from jax_extra by name."""
IN_F64 = {("marks", "leave"): f"{RECORD}.shared_scale"}
"""Likewise, in f64: what would round differently on each mesh."""
IMPORT = f"from tools.verify import record as {RECORD}; "


def rewritten(source: str, double: bool) -> str:
    """Replaces the functions of RECORDED in a module's source, and, if `double`, those of IN_F64, and f32 by f64.

    No line moves.
    """
    tree, replaced = ast.parse(source), RECORDED | (IN_F64 if double else {})
    edits: list[tuple[int, int, int, str]] = []  # line, from, to (in bytes of UTF-8), text

    def replace(node, text: str, first: int | None = None) -> None:
        start = node.end_col_offset - first if first is not None else node.col_offset
        edits.append((node.end_lineno, start, node.end_col_offset, text))

    named = {
        alias.asname or alias.name: RECORDED["jax_extra", alias.name]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "jax_extra"
        for alias in node.names
        if ("jax_extra", alias.name) in RECORDED
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in named:
            replace(node, named[node.id])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            of = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (of, node.attr) in replaced and node.lineno == node.end_lineno:
                replace(node, replaced[of, node.attr])
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
        elif double and _is_random_bits(node):  # its default dtype would become u64
            edits.append((node.end_lineno, node.end_col_offset - 1, node.end_col_offset - 1, ', dtype="uint32"'))
    if any(text in replaced.values() for *_, text in edits):
        first = next(n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom) and not _is_future(n))
        edits.append((first.lineno, first.col_offset, first.col_offset, IMPORT))

    lines = source.encode().splitlines(keepends=True)
    for line, start, end, text in sorted(edits, reverse=True):
        lines[line - 1] = lines[line - 1][:start] + text.encode() + lines[line - 1][end:]
    return b"".join(lines).decode()


def _is_random_bits(node: ast.AST) -> bool:
    """Tests for a call of `random.bits` without a dtype."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "bits"
        and len(node.args) == 2
        and not any(keyword.arg == "dtype" for keyword in node.keywords)
    )


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


LIBRARY = ("shardlib", "shardwright_data", "tools")
LIBRARY += tuple(f"shardwright.{name}" for name in ("cluster", "compiled", "microscope", "run", "sampling", "settings"))
"""Packages that are not copied: they have no math of the training step."""
WITH_LIBRARY = "shardwright"
"""The package of which parts are copied: the copy finds the others in the original."""


def find_sources(*modules: str) -> dict[str, Path]:
    """Finds the files of `modules` and of the modules that they import, without installed ones, Python's and LIBRARY.

    A package is found whole, since its copy replaces it whole. Raises ValueError if one of `modules` is not found.
    """
    found: dict[str, Path] = {}
    queue = list(modules)
    while queue:
        name = queue.pop()
        file = _own_file(name)
        if file is None and name in modules:
            raise ValueError(f"{name} is not a module in a file that Python finds: there is nothing to verify.")
        if file is None or name in found:
            continue
        found[name] = file
        if file.name == "__init__.py" and name != WITH_LIBRARY:
            queue += [f"{name}.{path.stem}" for path in file.parent.glob("*.py") if path.stem != "__init__"]
            queue += [f"{name}.{path.parent.name}" for path in file.parent.glob("*/__init__.py")]
        for node in ast.walk(ast.parse(file.read_text(), str(file))):
            if isinstance(node, ast.Import):
                queue += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                queue += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        queue += [name.rpartition(".")[0]] * ("." in name)
    return found


def _own_file(name: str) -> Path | None:
    if name.partition(".")[0] in sys.stdlib_module_names or f"{name}.".startswith(tuple(f"{x}." for x in LIBRARY)):
        return None
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # `from module import name`, where the name is not a module
        return None
    if spec is None or not (spec.origin or "").endswith(".py"):
        return None
    installed = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")]
    file = Path(spec.origin).resolve()
    return None if any(file.is_relative_to(path.resolve()) for path in installed) else file


def write_copy(sources: dict[str, Path], directory: Path, double: bool) -> None:
    """Writes the modules `sources`, rewritten, into the new `directory`."""
    for name, path in sources.items():
        place = directory / name.replace(".", "/")
        copy = place / "__init__.py" if path.name == "__init__.py" else place.with_suffix(".py")
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = rewritten(path.read_text(), double)
        copy.write_text(f"{text}\n__path__.append({str(path.parent)!r})\n" if name == WITH_LIBRARY else text)
