"""Single faults of the source: how they are addressed, planted, found by the syntax tree, and drawn.

What is not drawn: text (docstrings, messages, what is printed or logged), annotations and other type-only code, and
edits that evidently change nothing a test should see: the keywords in COSMETIC, decorators, sizes of caches, and
limits, which are powers or constants in capitals.
"""

import ast
import collections
import dataclasses
import json
import random
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SHORTEST, LONGEST = 24, 110
"""Characters of the expression that addresses a fault: long enough to be recognized, if the statement is."""
FLOOR = 4
"""Fewest faults that are drawn in a folder."""


@dataclasses.dataclass
class Fault:
    """A single edit: in a function, one occurrence of an expression or a statement becomes another.

    Line breaks do not count in `source` and `after`.
    """

    file: str
    function: str
    """Qualified by its classes and outer functions; "" at the top of the module."""
    kind: str
    source: str
    after: str
    occurrence: int = 1
    tests: list[str] | None = None
    """Some that fail. []: no quick test fails. None: not planted yet."""
    note: str = ""
    """Why no test fails, where somebody has looked."""

    def __str__(self) -> str:
        return f"{self.file}, {self.function or 'top'}: {self.source}  =>  {self.after}"

    @property
    def address(self) -> tuple:
        """What makes a fault another one."""
        return self.file, self.function, self.source, self.after, self.occurrence


def read_list(path: Path) -> list[Fault]:
    """Reads the list of faults."""
    return [Fault(**fault) for fault in tomllib.loads(path.read_text()).get("fault", [])] if path.exists() else []


def write_list(path: Path, faults: Sequence[Fault], head: str) -> None:
    """Writes the list of faults, sorted."""
    lines = [head]
    for fault in sorted(faults, key=lambda fault: fault.address):
        lines.append("[[fault]]")
        for field in dataclasses.fields(Fault):
            value = getattr(fault, field.name)
            if value != field.default or field.default is dataclasses.MISSING:
                lines.append(f"{field.name} = {_toml(value)}")
        lines.append("")
    path.write_text("\n".join(lines))


def _toml(value: object) -> str:
    if isinstance(value, list) and value:
        return "[\n" + "".join(f"    {_toml(item)},\n" for item in value) + "]"
    if isinstance(value, str) and '"' in value and "'" not in value and value.isprintable():
        return f"'{value}'"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---- planting -----------------------------------------------------------------------------------------------------


def joined(text: str) -> str:
    """Returns the text on one line."""
    return " ".join(text.split())


def is_address(node: ast.AST) -> bool:
    """Whether faults are addressed by a node: an expression, or a statement without a body."""
    return isinstance(node, ast.expr) or (isinstance(node, ast.stmt) and not hasattr(node, "body"))


class Module:
    """The text of a module, and the nodes of its tree by function."""

    def __init__(self, text: str):
        self.raw = text.encode()
        self.tree = ast.parse(text)
        self._starts = [0]
        for line in self.raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.functions: dict[str, list[ast.AST]] = collections.defaultdict(list)
        """Expressions and simple statements of each function, from its start to its end."""
        self.parents: dict[ast.AST, ast.AST] = {}
        self._add(self.tree, "")

    def _add(self, node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            self.parents[child] = node
            if is_address(child):
                self.functions[function].append(child)
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            self._add(child, f"{function}.{child.name}".lstrip(".") if named else function)

    def place(self, line: int, column: int) -> int:
        """Returns the offset of a place in the raw text."""
        return self._starts[line - 1] + column

    def span(self, node: Any) -> tuple[int, int]:
        """Returns the offsets of the start and the end of a node."""
        return self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.AST) -> str:
        """Returns the text of a node."""
        start, end = self.span(node)
        return self.raw[start:end].decode()

    def found(self, function: str, source: str) -> list[Any]:
        """Lists the nodes in a function with this text, each place once."""
        nodes = [node for node in self.functions[function] if joined(self.of(node)) == source]
        return [*{self.span(node): node for node in sorted(nodes, key=self.span)}.values()]

    def exchanged(self, node: ast.AST, after: str) -> str:
        """Returns the text with another in the place of a node, on as many lines."""
        start, end = self.span(node)
        breaks = "\n" * self.raw[start:end].count(b"\n")
        if breaks:
            after = f"({after}{breaks})" if isinstance(node, ast.expr) else after + breaks
        return (self.raw[:start] + after.encode() + self.raw[end:]).decode()


def planted(text: str, fault: Fault) -> tuple[str, range] | None:
    """Returns the text of a module with the fault, and the lines that it changes; None if its place is not there."""
    module = Module(text)
    nodes = module.found(fault.function, fault.source)
    if len(nodes) < fault.occurrence:
        return None
    node = nodes[fault.occurrence - 1]
    return module.exchanged(node, fault.after), range(node.lineno, node.end_lineno + 1)


# ---- finding ------------------------------------------------------------------------------------------------------

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "not in": "in"}
COMPARISONS |= {"is": "is not", "is not": "is"}
CALLS = {"min": "max", "minimum": "maximum", "any": "all", "floor": "ceil", "argmin": "argmax", "zeros": "ones"}
CALLS |= {"startswith": "endswith", "sum": "max", "zeros_like": "ones_like"}
CALLS |= {after: before for before, after in CALLS.items() if before != "sum"}
PRINTED = {"print", "log", "info", "warn", "warning", "debug", "error", "exception", "add_argument", "TypeVar"}
"""Functions whose arguments are text for people, or types."""
TEXT = {"__repr__", "__str__", "__all__"}
COSMETIC = {"strict", "frozen", "slots", "repr", "reason", "encoding", "timeout", "daemon", "help", "title", "label"}
COSMETIC |= {"maxsize", "name", "exist_ok", "parents", "style", "donate_argnums", "compare", "unsafe_hash", "indent"}
COSMETIC |= {"copy", "ignore_errors"}
COSMETIC |= {"max_workers", "thread_name_prefix", "color", "width", "height", "static_argnames", "errors", "kw_only"}
"""Keywords that neither change results nor, on right input, behavior."""


@dataclasses.dataclass(frozen=True)
class _Edit:
    kind: str
    node: ast.AST
    start: int
    end: int
    text: str


def faults(file: str, text: str) -> Iterator[Fault]:
    """Yields the faults of a module, each once. Some are no code: see `is_one`."""
    module, seen = Module(text), set()
    functions = {node: function for function, nodes in module.functions.items() for node in nodes}
    for edit in _edits(module, module.tree):
        node = edit.node
        while (wider := _wider(module, node)) is not None and len(joined(module.of(node))) < SHORTEST:
            node = wider
        source = joined(module.of(node))
        if len(source) > LONGEST or node not in functions:
            continue
        start, end = module.span(node)
        raw = module.raw
        after = joined((raw[start : edit.start] + edit.text.encode() + raw[edit.end : end]).decode())
        found = [module.span(same) for same in module.found(functions[node], source)]
        fault = Fault(file, functions[node], edit.kind, source, after, found.index((start, end)) + 1)
        if fault.address not in seen:
            seen.add(fault.address)
            yield fault


def _wider(module: Module, node: ast.AST) -> ast.AST | None:
    """The next expression or simple statement around a node, unless it is too long or may have a comment inside."""
    if isinstance(node, ast.stmt):
        return None
    node = module.parents[node]
    while not isinstance(node, ast.expr | ast.stmt):
        node = module.parents[node]
    return node if is_address(node) and len(text := joined(module.of(node))) <= LONGEST and "#" not in text else None


def is_one(text: str, fault: Fault) -> bool:
    """Whether the expression on one line is the same code as in the module, and the fault is code that differs."""

    def dumped(code: str) -> str:
        return ast.dump(ast.parse(code))

    module = Module(text)
    node = module.found(fault.function, fault.source)[fault.occurrence - 1]
    try:
        same, changed = (dumped(module.exchanged(node, after)) for after in (fault.source, fault.after))
    except SyntaxError:
        return False
    return same == dumped(text) != changed


def _edits(module: Module, node: ast.AST) -> Iterator[_Edit]:
    """Yields the edits in a node, but for those in what is skipped."""
    yield from _edits_of(module, node)
    skipped: set[ast.AST] = set()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        skipped |= {*node.decorator_list, *([node.returns] if node.returns else [])}
    elif isinstance(node, ast.ClassDef):
        skipped |= {*node.decorator_list, *node.bases}
    elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
        skipped.add(node.annotation)
    elif isinstance(node, ast.Raise) and node.exc:
        skipped.add(node.exc)
    elif isinstance(node, ast.keyword) and node.arg in COSMETIC:
        skipped.add(node.value)
    elif isinstance(node, ast.Assign) and all(name.isupper() for name in ast.unparse(node.targets[0]).split(", ")):
        return
    for child in ast.iter_child_nodes(node):
        if child not in skipped and not _is_text(child):
            yield from _edits(module, child)


def _is_text(node: ast.AST) -> bool:
    """Whether code is text for people, or types."""
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name in TEXT or any(_name(decorator) == "overload" for decorator in node.decorator_list)
    if isinstance(node, ast.If):
        return any(_name(part) in ("TYPE_CHECKING", "__name__") for part in ast.walk(node.test))
    if isinstance(node, ast.Call):
        return _name(node.func) in PRINTED
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _edits_of(module: Module, node: ast.AST) -> Iterator[_Edit]:
    """Yields the edits of the node itself."""
    if isinstance(node, ast.Compare):
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            yield from _operator(module, "comparison", node, left, right, COMPARISONS)
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from _operator(module, "and, or", node, left, right, {"and": "or", "or": "and"})
    elif isinstance(node, ast.BinOp):
        if not any(isinstance(side, ast.List | ast.JoinedStr) or _is_str(side) for side in (node.left, node.right)):
            yield from _operator(module, "plus, minus", node, node.left, node.right, {"+": "-", "-": "+"})
        if isinstance(node.op, ast.FloorDiv):
            yield _Edit("rounding", node, *module.span(node), f"-(-{module.of(node)})")
    elif isinstance(node, ast.UnaryOp):
        is_ceil = isinstance(node.operand, ast.BinOp) and isinstance(node.operand.op, ast.FloorDiv)
        if isinstance(node.op, ast.Not) or (
            isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant)
        ):
            kind = "rounding" if is_ceil else "not" if isinstance(node.op, ast.Not) else "sign"
            yield _Edit(kind, node, *module.span(node), module.of(node.operand))
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield _Edit("flag", node, *module.span(node), str(not node.value))
        elif isinstance(node.value, int):
            yield _Edit("constant", node, *module.span(node), str(node.value + 1))
    elif isinstance(node, ast.Call):
        yield from _edits_of_call(module, node)
    elif isinstance(node, ast.If | ast.IfExp | ast.While) and isinstance(
        node.test, ast.Name | ast.Attribute | ast.Call
    ):
        yield _Edit("condition", node.test, *module.span(node.test), f"not {module.of(node.test)}")
    elif isinstance(node, ast.Slice) and isinstance(node.upper, ast.Name | ast.Attribute | ast.BinOp):
        yield _Edit("end of slice", node.upper, *module.span(node.upper), f"{module.of(node.upper)} - 1")
    elif isinstance(node, ast.stmt):
        yield from _edits_of_statement(module, node)


def _is_str(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _operator(module: Module, kind: str, node: ast.AST, left: ast.AST, right: ast.AST, table: dict) -> Iterator[_Edit]:
    """Yields the edit of the operator between two operands, if it is in the table."""
    start, end = module.span(left)[1], module.span(right)[0]
    between = module.raw[start:end].decode()
    before = joined(between.strip("() \n"))
    if before in table:
        yield _Edit(kind, node, start, end, joined(between).replace(before, table[before]).join("  "))


def _edits_of_call(module: Module, node: ast.Call) -> Iterator[_Edit]:
    start, end = module.span(node.func)
    name = _name(node.func)
    if name in CALLS:
        text = module.of(node.func).removesuffix(name) + CALLS[name]
        yield _Edit("function", node, start, end, text)
    for keyword in node.keywords:
        if keyword.arg and keyword.arg not in COSMETIC:
            begin, until = module.span(keyword)
            rest = module.raw[until : module.span(node)[1]]
            comma = len(rest) - len(rest.lstrip(b", \n"))
            yield _Edit("keyword dropped", node, begin, until + comma, "")


def _edits_of_statement(module: Module, node: ast.stmt) -> Iterator[_Edit]:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_text(node.value)
    is_update = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    if is_call or is_update or isinstance(node, ast.AugAssign | ast.Raise):
        yield _Edit("statement dropped", node, *module.span(node), "pass")
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
        yield from _operator(module, "plus, minus", node, node.target, node.value, {"+=": "-=", "-=": "+="})


# ---- drawing ------------------------------------------------------------------------------------------------------


def sources(root: Path) -> Iterator[str]:
    """Yields the files in which faults are planted."""
    yield "train.py"
    for top in ("shardlib", "shardwright"):
        for path in sorted((root / top).rglob("*.py")):
            if not path.is_symlink() and "template" not in path.parts:
                yield str(path.relative_to(root))


def folder(file: str) -> str:
    """Returns the part of the source that a file belongs to: its folder, of the programs all of tools/."""
    return "shardwright/tools" if file.startswith("shardwright/tools/") else file.rpartition("/")[0] or file


def draw(root: Path, number: int, seed: int, known: Sequence[Fault]) -> list[Fault]:
    """Draws about so many faults that are not known: by folder in proportion to its lines, at least FLOOR.

    In a folder a file is drawn by its lines, in it a kind, and one of its faults. A function has one fault.
    """
    rng = random.Random(seed)
    texts = {file: (root / file).read_text() for file in sources(root)}
    lines = {file: text.count("\n") for file, text in texts.items()}
    taken = {(fault.file, fault.function) for fault in known}
    found: dict[str, list[Fault]] = {}
    result = []
    for of in sorted({folder(file) for file in texts}):
        files = [file for file in texts if folder(file) == of]
        count = max(FLOOR, round(number * sum(lines[file] for file in files) / sum(lines.values())))
        for _ in range(count):
            for _ in range(100):
                file = rng.choices(files, [lines[file] for file in files])[0]
                if file not in found:
                    found[file] = [*faults(file, texts[file])]
                left = [fault for fault in found[file] if (file, fault.function) not in taken]
                if left:
                    kind = rng.choice(sorted({fault.kind for fault in left}))
                    fault = rng.choice([fault for fault in left if fault.kind == kind])
                    if not is_one(texts[file], fault):
                        continue
                    taken.add((file, fault.function))
                    result.append(fault)
                    break
    return result
