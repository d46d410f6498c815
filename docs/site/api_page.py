"""docs/api.md: what models, losses and tools of your own call, with signatures and docstrings.

python -m docs.site.api_page > docs/api.md
"""

import ast
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from docs.site.ops_page import signature

PARTS = {
    "Models": {
        "shardwright.modeling.model": "LanguageModel.embed.layer.logits Tokens",
        "shardwright.modeling.weights": "table_of",
        "shardwright.modeling.attention": "Attention.expand.recur",
        "shardwright.modeling.masks": "AttentionMask",
        "shardwright.modeling.state": "KeyValues",
        "shardwright.modeling.rope": "rotate",
        "shardlib.layers": "LayerAux",
        "shardwright.jax_extra": "save_for_backward solve_unit_lower",
    },
    "Checks in tests": {
        "shardwright.testing": "assert_sound",
        "shardlib.exact": "check same differences reference",
    },
    "Training programs, data and trackers": {
        "shardwright.program.spec": "StepSpec",
        "shardwright.data.loader": "make_loader TokenBatch "
        "Loader.rows.sequences.load.state.documents",
        "shardwright.huggingface": "Names",
        "shardwright.program.trackers": "Facts Opened",
    },
}
"""Functions and classes by module, and the methods that users call."""
HEAD = """# Model and training API: reference

What models, losses and tools of your own call besides the [typed ops](ops.md). [models.md](models.md) and
[changing.md](changing.md) teach it. This page is made from the docstrings.
"""
SECTION = re.compile(
    r"^(Args|Attributes|Returns|Yields|Raises):\n((?:(?: {4}.*)?\n)*)", re.MULTILINE
)


def in_markdown(doc: str) -> str:
    """A docstring with its sections as lists."""

    def section(found: re.Match[str]) -> str:
        title, lines = found[1], textwrap.dedent(found[2]).strip()
        if title not in ("Returns", "Yields"):
            lines = re.sub(r"^([*\w]+[\w, ]*): ", r"- `\1`: ", lines, flags=re.MULTILINE)
        return f"{'Arguments' if title == 'Args' else title}:\n\n{lines}\n"

    return SECTION.sub(section, doc.strip() + "\n")


def fields(x: type) -> Iterator[str]:
    """The fields of a class that have a string after them, as a list."""
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(x))).body
    assert isinstance(found, ast.ClassDef)
    for field, after in itertools.pairwise(found.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            text = inspect.cleandoc(str(after.value.value)).replace("\n", "\n  ")
            yield f"- `{ast.unparse(field.target)}`: {text}"


def entry(module: str, name: str, *methods: str) -> Iterator[str]:
    """The lines of a function or class, and of methods of a class."""
    x: Any = getattr(importlib.import_module(module), name)
    yield f"### {name}\n\n`{module}.{name}`\n"
    if inspect.isfunction(x):
        yield f"`{signature(x)}`\n"
    yield in_markdown(inspect.getdoc(x) or "")
    if inspect.isclass(x) and (lines := [*fields(x)]):
        yield "\n".join(["Attributes:\n", *lines, ""])
    for method in (getattr(x, method) for method in methods):
        yield f"`.{signature(method)}`\n\n{in_markdown(inspect.getdoc(method) or '')}"


def page() -> str:
    """The text of docs/api.md."""
    lines = [HEAD]
    for title, modules in PARTS.items():
        lines.append(f"## {title}\n")
        for module, names in modules.items():
            for name in names.split():
                lines += entry(module, *name.split("."))
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
