"""Writes the report as a self-contained HTML page."""

import json
import math
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
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: (
            value if isinstance(value, Markup | jinja2.Undefined) else shown(value)
        ),
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["json"] = as_json
    texts = {
        kind: Markup((TEMPLATES / name).read_text(encoding="utf-8"))
        for kind, name in (
            ("style", "page.css"),
            ("script", "page.js"),
            ("plotly", "plotly-basic.min.js"),
        )
    }
    found = [(s, data) for s in SECTIONS if (data := s.data(c)) is not None]
    rendered = [
        (s, Markup(environment.get_template(f"{s.name}.html").render(data))) for s, data in found
    ]
    return environment.get_template("page.html").render(head(c), sections=rendered, **texts)


def as_json(data: Any) -> Markup:
    """Formats data as JSON for a <script>, with < escaped, so that no text in it can end the
    script.
    """
    return Markup(json.dumps(_finite(data), separators=(",", ":")).replace("<", "\\u003c"))


def _finite(value: Any) -> Any:
    """Converts arrays to lists, rounds fractions to six digits, and writes NaN and infinities as
    null, as JSON must.
    """
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_finite(x) for x in value]
    if isinstance(value, float):
        exact = value.is_integer()
        return int(value) if exact else float(f"{value:.6g}") if math.isfinite(value) else None
    return value
