"""Writes the report as a self-contained HTML page."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from shardwright.data.untrusted import shown
from shardwright.tools.report.comparing import Comparison
from shardwright.tools.report.sections import SECTIONS, head

TEMPLATES = Path(__file__).parent / "templates"


def page(c: Comparison) -> str:
    """Renders the page. All content is escaped and stripped of control characters."""
    found = [(s, f"{s.name}.html", data) for s in SECTIONS if (data := s.data(c)) is not None]
    return page_of(head(c), found, [TEMPLATES])


def page_of(top: dict[str, Any], sections: Sequence[tuple[Any, str, dict[str, Any]]], templates: list[Path]) -> str:
    """Renders a page from `top`, the data of page.html, and sections: (name and title, template, its data).

    `templates` are directories of templates.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup | jinja2.Undefined) else shown(value),
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["json"] = as_json
    texts = {
        kind: Markup((TEMPLATES / name).read_text(encoding="utf-8"))
        for kind, name in (("style", "page.css"), ("script", "page.js"), ("plotly", "plotly-basic.min.js"))
    }
    rendered = [(s, Markup(environment.get_template(name).render(data))) for s, name, data in sections]
    return environment.get_template("page.html").render(top, sections=rendered, **texts)


def as_json(data: Any) -> Markup:
    """Formats data as JSON for a <script>, with < escaped, so that no text in it can end the script."""
    return Markup(json.dumps(_finite(data), separators=(",", ":")).replace("<", "\\u003c"))


def _finite(value: Any) -> Any:
    """Converts arrays to lists, rounds fractions to six digits, and writes NaN and infinities as null, as JSON must."""
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_finite(x) for x in value]
    if isinstance(value, float):
        exact = value.is_integer()
        return int(value) if exact else float(f"{value:.6g}") if math.isfinite(value) else None
    return value
