"""Diagrams of the pages, as SVGs on a light plate for light and dark themes: what `pictures.py`
writes.
"""

import ast
from pathlib import Path

STYLE = """
  text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #1f2328 }
  .code { font: 12px ui-monospace, monospace } .head { font-weight: 600 } .small { font-size: 11px }
  .box { fill: #ffffff; stroke: #8c959f } .line { stroke: #57606a; fill: none; stroke-width: 1.5 }
  .a { fill: #b6d7f2 } .b { fill: #f7d7a8 } .c { fill: #c6e7c4 }
  .d { fill: #e3cdf0 } .tip { fill: #57606a }
  .plate { fill: #ffffff }
"""
TIP = (
    '<marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
    '<path class="tip" d="M0 0L8 4L0 8z"/></marker>'
)


class Drawing:
    """An SVG that is drawn part by part, with a title that screen readers read."""

    def __init__(self, width: int, height: int, title: str):
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" role="img">'
        )
        plate = f'<rect class="plate" width="{width}" height="{height}" rx="4"/>'
        self._parts = [
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{TIP}</defs>",
            plate,
        ]

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """Text whose baseline is at y."""
        text = text.replace("&", "&amp;").replace("<", "&lt;")
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{text}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, kind: str = "box", text: str = ""
    ) -> None:
        """A rectangle, with a text in its middle."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'class="{kind}"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, "small")

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through points, with a tip at its end."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="line" d="M{path}" marker-end="url(#tip)"/>')

    def __str__(self) -> str:
        return "\n".join([self._head, *self._parts, "</svg>", ""])


def mesh() -> str:
    """A weight `M/d F/t` on a mesh of d=2 and t=2: at rest, gathered for a matmul, and the partial
    sum that follows.
    """
    found = Drawing(
        760,
        318,
        "A weight on four devices: sharded at rest, gathered over d, and a partial sum over t",
    )
    columns = (
        ("at rest", "f32[M/d F/t]", "each device holds a quarter"),
        ("all_gather over d", "act[M F/t]", "whole M, one half of F"),
        ("matmul", "act[B/d L M +t]", "one term of a sum over t"),
        ("psum_scatter over t", "act[B/d L/t M]", "the sum, one half of L"),
    )
    for i, (title, spec, note) in enumerate(columns):
        left = 20 + i * 188
        found.text(left + 70, 24, title, "head")
        found.text(left + 70, 44, spec, "code")
        found.text(left + 70, 62, note, "small")
        for device in range(4):
            d, t = divmod(device, 2)
            x, y = left + 74 * t, 82 + 118 * d
            found.box(x, y, 64, 92)
            found.text(x + 32, y + 106, f"d{d} t{t}", "small")
            if i < 2:
                colors, rows = "abcd", (d,) if i == 0 else (0, 1)
                for row in rows:
                    found.box(x + 8 + 24 * t, y + 10 + 36 * row, 24, 36, colors[2 * row + t])
            elif i == 2:
                found.box(x + 8, y + 10 + 36 * d, 48, 36, "b" if t else "a", "½ Σ")
            else:
                found.box(x + 8 + 24 * t, y + 10 + 36 * d, 24, 36, "c", "Σ")
        if i:
            found.arrow((left - 44, 190), (left - 8, 190))
    return str(found)


def step() -> str:
    """A step of one device over time: matmuls above, and below the collectives that overlap with
    them.
    """
    found = Drawing(
        800,
        176,
        "Timeline of a training step: compute, and the communication that overlaps with it",
    )
    found.text(12, 66, "compute", "head", "start")
    found.text(12, 116, "network", "head", "start")
    x = 90
    for name, kind, width in (
        ("embed", "a", 60),
        ("layer 0", "a", 86),
        ("layer 1", "a", 86),
        ("logits, loss", "b", 90),
        ("layer 1 backward", "c", 130),
        ("layer 0 backward", "c", 130),
        ("update", "d", 84),
    ):
        found.box(x, 46, width, 32, kind, name)
        x += width + 4
    for at, width, text in (
        (90, 60, "gather 0"),
        (154, 86, "gather 1"),
        (334, 90, "gather 1"),
        (428, 62, "gather 0"),
        (562, 62, "reduce 1"),
        (696, 62, "reduce 0"),
    ):
        found.box(at, 98, width, 28, "box", text)
    found.text(90, 150, "forward: weights of the next layer are gathered", "small", "start")
    found.text(90, 166, "while this one computes", "small", "start")
    found.text(428, 150, "backward: what was not saved is recomputed, and the", "small", "start")
    found.text(428, 166, "gradients of the layer before are reduced meanwhile", "small", "start")
    found.arrow((90, 30), (784, 30))
    found.text(786, 22, "time", "small", "end")
    return str(found)


FLOORS = (
    ("shardwright/tools", "programs next to training: plan, verify, replay, generate, report, …"),
    ("shardwright/models", "GPT-2, the families of Qwen, Mistral, Gemma, …, mixture of experts"),
    ("train.py", "model, forward pass, loss, gradients, optimizer, step, loop"),
    ("shardwright", "runs, checkpoints, checks, plan, statistics, optimizers, attention"),
    ("shardwright/data", "text, tokenizers, datasets, batches"),
    ("shardlib", "sharding types, typed ops, the check, pipelines; installs alone"),
)


def floor_of(module: str) -> str | None:
    """The floor of a module, the longest path that its name begins with."""
    found = [
        name
        for name, _ in FLOORS
        if f"{module}.".startswith(f"{name.removesuffix('.py').replace('/', '.')}.")
    ]
    return max(found, key=len, default=None)


def imports_of(floor: str, root: Path) -> set[str | None]:
    """The floors that the modules of a floor import."""
    path, found = root / floor, set()
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        if (
            file.is_symlink()
            or floor_of(".".join(file.relative_to(root).with_suffix("").parts)) != floor
        ):
            continue
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        found |= {
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        }
        froms = [
            node
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module and not node.level
        ]
        found |= {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
    return {
        "train.py" if name.startswith("shardwright.train.") else floor_of(name) for name in found
    }


def architecture(root: Path) -> str:
    """The packages as floors, and which imports which, as the source has it."""
    found = Drawing(
        760,
        24 + 62 * len(FLOORS),
        "The packages of shardwright, each importing only those below it",
    )
    for i, (name, purpose) in enumerate(FLOORS):
        y, used = 12 + 62 * i, imports_of(name, root)
        below = [other for other, _ in FLOORS[i + 1 :] if other in used]
        found.box(10, y, 740, 50, "abcd"[i % 4])
        found.text(24, y + 21, name if "." in name else f"{name}/", "head", "start")
        found.text(24, y + 40, purpose, "small", "start")
        found.text(
            738,
            y + 21,
            f"imports {', '.join(below)}" if below else "imports none of these",
            "small",
            "end",
        )
    return str(found)


def main() -> None:
    """Writes them into docs/pictures."""
    root = Path(__file__).parents[2]
    for name, text in {"mesh": mesh(), "step": step(), "architecture": architecture(root)}.items():
        (root / f"docs/pictures/{name}.svg").write_text(text)


if __name__ == "__main__":
    main()
