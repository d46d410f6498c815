"""docs/ops.md: the typed ops by group, with signatures, docstrings and examples.

python -m docs.site.ops_page > docs/ops.md
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

from shardlib import shardops

GROUPS = {
    "Collectives": (
        *("all_gather", "psum", "psum_scatter", "pmax", "all_to_all", "ppermute", "zigzag"),
    ),
    "Without communication": (
        *(
            "einsum_unreduced",
            "matmul",
            "products",
            "index_unreduced",
            "broadcast",
            "replicate",
            "shard",
        ),
        *("rearrange", "take_rows", "add_rows", "grouped_product"),
    ),
    "Sizes and positions": ("axis_size", "axis_index", "size", "positions", "zeros"),
    "Code that differs between devices": ("alone",),
}
HEAD = """# Typed ops: API reference

[sharding-types.md](sharding-types.md) teaches the types; this page lists every op of `shardlib.shardops`, and the
[types and decorators](#types-and-decorators) of `shardlib.shardtypes`. It is made from the docstrings.
"""
TAIL = """## Types and decorators

From `shardlib.shardtypes`:

| name | purpose |
|---|---|
| `f32["B/d M"]`, `bf16`, `i32`, `u32`, `bool_`, … | an array type: dtype and spec; `f32[""]` is a scalar |
| `dtype_name("act")` | a dtype that `Scope(act=jnp.bfloat16)` chooses |
| `typed` | decorator: checks arguments, results and annotated local variables |
| `typed_shard_map` | decorator: the same, and runs the function on each device, sharded by its types |
| `pytree_dataclass` | a dataclass of typed arrays, as a pytree |
| `Array["layers", Layer]` | a dataclass whose arrays have more leading dims |
| `make_shardings(T, like=)` | the JAX shardings of a type on the current mesh |
| `map_arrays(fn, x)` | applies `fn(name, type, array)` to all arrays, for example to gather them |
| `pipeline_stage()` | context manager in which specs leave p out |

`shardlib.exact.check` says whether a per-device function computes on its mesh what it computes on one device:
[soundness.md](soundness.md).
"""


def signature(op: Callable[..., Any]) -> str:
    """How an op is called, without annotations."""
    whole = inspect.signature(op)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in whole.parameters.values()]
    return f"{op.__name__}{inspect.Signature(parameters)}"


def in_markdown(doc: str) -> list[str]:
    """The lines of a docstring: its arguments as a list, its example as a block."""
    prose, _, example = doc.partition("\n>>> ")
    text, _, arguments = prose.partition("Args:\n")
    lines = [text.strip(), ""]
    if arguments:
        arguments = re.sub(r"^ {4}(\S+): ", r"- `\1`: ", arguments, flags=re.MULTILINE)
        lines += [
            "Arguments:",
            "",
            re.sub(r"^ {8}", "  ", arguments, flags=re.MULTILINE).strip(),
            "",
        ]
    return [*lines, "```python", f">>> {example.strip()}", "```", ""]


def page() -> str:
    """The text of docs/ops.md."""
    lines = [HEAD, *in_markdown(inspect.cleandoc(shardops.__doc__ or ""))]
    for title, names in GROUPS.items():
        lines += [f"## {title}", ""]
        for name in names:
            op = getattr(shardops, name)
            lines += [
                f"### {name}",
                "",
                f"`{signature(op)}`",
                "",
                *in_markdown(inspect.getdoc(op) or ""),
            ]
    return "\n".join([*lines, TAIL])


if __name__ == "__main__":
    print(page(), end="")
