"""The page of HTML, one file that refers to no other, and how it is written."""

import json
import math
import os
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from shardwright_data.foreign import shown
from tools.report.plots import Panel
from tools.report.sections import SECTIONS, Report, head

TEMPLATES = Path(__file__).parent / "templates"


def page(r: Report) -> str:
    """The page. Whatever it shows is escaped, and has no character that a terminal or a browser would obey."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = _figure
    text = lambda name: Markup((TEMPLATES / name).read_text())
    found = [(section, data) for section in SECTIONS if (data := section.data(r)) is not None]
    shown_sections = [(s, Markup(environment.get_template(f"{s.name}.html").render(data))) for s, data in found]
    return environment.get_template("page.html").render(
        head(r), sections=shown_sections, style=text("page.css"), script=text("page.js"), plotly=Markup(get_plotlyjs())
    )


def _figure(panel: Panel) -> Markup:
    """The plot as JSON within a <script>, where only < could end it."""
    return Markup(json.dumps(_plain(panel.figure), allow_nan=False).replace("<", "\\u003c"))


def _plain(value: Any) -> Any:
    """The value for JSON: numbers with six digits, null for those that are not finite."""
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(x) for x in (value.tolist() if isinstance(value, np.ndarray) else value)]
    if isinstance(value, float):
        rounded = float(f"{value:.6g}") if math.isfinite(value) else None
        return int(rounded) if rounded is not None and rounded.is_integer() and abs(rounded) < 1e6 else rounded
    return value


def write(r: Report, output: Path) -> None:
    """Writes the page. A reader sees the old file or the new."""
    content = page(r)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(content)
        temporary.rename(output)
    finally:
        temporary.unlink(missing_ok=True)
