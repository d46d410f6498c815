"""The page of HTML, one file that refers to no other."""

from pathlib import Path

import jinja2
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from shardwright_data.foreign import shown
from tools.report.comparing import Comparison
from tools.report.plots import Panel
from tools.report.sections import SECTIONS, head

TEMPLATES = Path(__file__).parent / "templates"


def page(c: Comparison) -> str:
    """The page. Whatever it shows is escaped, and has no character that a terminal or a browser would obey."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup | jinja2.Undefined) else shown(value),
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = figure
    text = lambda name: Markup((TEMPLATES / name).read_text())
    found = [(section, data) for section in SECTIONS if (data := section.data(c)) is not None]
    shown_sections = [(s, Markup(environment.get_template(f"{s.name}.html").render(data))) for s, data in found]
    return environment.get_template("page.html").render(
        head(c), sections=shown_sections, style=text("page.css"), script=text("page.js"), plotly=Markup(get_plotlyjs())
    )


def figure(panel: Panel) -> Markup:
    """The plot as JSON within a <script>. Plotly writes < as an escape, so that no text of the plot ends the script."""
    return Markup(to_json_plotly(panel.figure))
