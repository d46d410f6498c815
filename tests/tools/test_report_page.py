"""The page of tools.report: what it says of a run, whole, damaged or a stranger's; and how it
looks, in Chromium.
"""

import json
import math
import os
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from shardwright.tools.report.__main__ import Settings, show_report
from shardwright.tools.report.comparing import Comparison, compare_runs
from shardwright.tools.report.page import as_json
from shardwright.tools.report.plots import Panel, axes_of, panels_of
from shardwright.tools.report.reading import read_run
from shardwright.tools.report.sections import SECTIONS, head, microscope, samples, settings
from tests.support.browser import CHROMIUM, seen
from tests.support.written_runs import PROFILE, write_lines, write_run, write_step


def report(*directories: Path) -> Comparison:
    return compare_runs([read_run(directory) for directory in directories], "run")


def write_page(*directories: Path, output: Path | None = None) -> Path:
    with open(os.devnull, "w") as nothing:
        given = Settings(
            run=[str(directory) for directory in directories], output=output and str(output)
        )
        show_report(given, Console(file=nothing, width=100))
    return output or directories[0] / "report.html"


class Reader(HTMLParser):
    """The text of a page outside of scripts and styles, and its elements."""

    def __init__(self, page: Path):
        super().__init__()
        self.words, self.elements, self._silent = "", [], 0
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._silent += tag in ("script", "style")

    def handle_endtag(self, tag):
        self._silent -= tag in ("script", "style")

    def handle_data(self, data):
        self.words += "" if self._silent else data

    @property
    def text(self) -> str:
        return " ".join(self.words.split())


# ---- what it says --------------------------------------------------------------------------------


def test_the_head_has_the_key_figures(tmp_path):
    run = write_run(tmp_path / "run")
    shown = head(report(run))
    assert (shown["title"], shown["run"].why, shown["running"]) == ("run", "SIGTERM", False)
    assert shown["progress"] == 200 / 250
    found = {name: value for name, value, _ in shown["figures"]}
    validations = [
        line for line in (run / "metrics.jsonl").read_text().splitlines() if "validation" in line
    ]
    assert found == {
        "loss": found["loss"],
        "val": f"{json.loads(validations[-1])['loss']:.3f}",
        "bits/byte": f"{json.loads(validations[-1])['loss'] / 2:.3f}",
        "tokens/s": "1.38k",
        "MFU": "120.0%",
        "memory": "~3.00 MiB",
        "idle": "1.23%",
        "steps": "200/250",
        "tokens": "128k",
        "time": "0:01:40",
    }


@pytest.mark.parametrize(
    ("end", "lock", "steps", "state"),
    [
        ({"state": "finished"}, None, 4, "finished"),
        ({"state": "failed", "why": "OSError: no"}, None, 2, "failed"),
        ({"state": "stopped"}, {"pid": os.getpid(), "host": os.uname().nodename}, 2, "stopped"),
        ({"state": "<b>"}, None, 2, "unknown"),
        # it saves and validates
        (None, {"pid": os.getpid(), "host": os.uname().nodename}, 4, "running"),
        (None, {"pid": 1, "host": "another"}, 2, "running"),
        # a larger one than Linux gives
        (None, {"pid": 2**22 + 1, "host": os.uname().nodename}, 2, "broke off"),
        (None, {"pid": [], "host": os.uname().nodename}, 2, "broke off"),
        (None, None, 2, "broke off"),
        (None, None, 0, "not begun"),
    ],
)
def test_the_state_of_a_run(tmp_path, end, lock, steps, state):
    lines = [{"step": step, "loss": 1.0, "tokens": 1} for step in range(1, steps + 1)]
    write_lines(
        tmp_path / "metrics.jsonl", lines + ([{"step": steps, "event": "end"} | end] if end else [])
    )
    (tmp_path / "config.yaml").write_text("training: {steps: 4}")
    if lock:
        (tmp_path / ".lock").write_text(json.dumps(lock))
    assert read_run(tmp_path).state == state


def test_the_plots_of_a_run_alone(tmp_path):
    c = report(write_run(tmp_path / "run"))
    loss, norm, *others = panels_of(c)
    assert [panel.title for panel in others] == [
        *("Learning rate", "Tokens/s", "noise", "pair", "stream")
    ]
    by_name = {trace["name"]: trace for trace in loss.traces}
    assert [*by_name] == ["each step", "average", "validation"]
    assert [*by_name["validation"]["meta"]["x"]["steps"]] == [50, 100, 150, 200]
    ((steps,), (tokens,), (minutes,)) = axes_of(c).values()
    assert len(steps) == len(tokens) == len(minutes) == len(by_name["average"]["y"]) == 200
    assert (steps[-1], tokens[-1], minutes[-1]) == (200, 128000, pytest.approx(198 * 0.5 / 60))
    assert [trace["name"] for trace in norm.traces] == ["each step", "average"]


def test_the_last_look_of_the_microscope_is_tables(tmp_path):
    found = microscope(read_run(write_run(tmp_path / "run")))
    assert (found["step"], found["count"]) == (101, 2)
    activations, weights = found["tables"]
    assert activations.rows == [
        ["Llama.layer gate train.py:159", "1.5\xa0– 4.5", "8", "0%", "0%", "0%\xa0– 50%"]
    ]
    assert weights.rows == [["embed", "0.125", "2", "0.0625", "0.00248", "inf", "0.3%"]]


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"points": [1, [], {}], "weights": [{"name": [], "rms": {}, "gradient": 7}]},
        {"points": [{"name": "x", "rms": ["Infinity", None, "y"], "max": []}]},
    ],
)
def test_a_strange_look_is_shown_as_far_as_it_is_known(tmp_path, event):
    run = write_run(tmp_path / "run")
    lines = [{"step": 1, "loss": 1.0}, {"step": 1, "event": "microscope"} | event]
    write_lines(run / "metrics.jsonl", lines)
    page = Reader(write_page(run))
    assert ("Under the microscope" in page.text) == isinstance(event.get("points"), list)


def test_settings_that_were_chosen_come_first(tmp_path):
    shown = settings(read_run(write_run(tmp_path / "run", rate=0.03)))
    chosen, defaults = shown["groups"].values()
    assert {("optimizer.learning_rate", "0.03", ""), ("optimizer.warmup_steps", "1", "100")} <= {
        *chosen
    }
    assert [name for name, *_ in defaults] == ["model.module", "training.seed"]


def test_samples_and_provenance(tmp_path):
    r = read_run(write_run(tmp_path / "run"))
    first, second = samples(r)["prompts"]
    assert (first["prompt"], second["prompt"]) == ("", "Emma ")
    steps = [step for step, *_ in first["rows"]]
    assert (steps[0], steps[-1], len(steps), first["left_out"]) == (0, 200, 12, 9)
    assert first["rows"][-1] == (200, "It is a truth 200\nand more", True)
    text = Reader(write_page(tmp_path / "run")).text
    command = "python -m train --config-name=tiny optimizer.learning_rate=0.01"
    for made in (
        command,
        "2026-01-01T01:00:00Z",
        "0123456789abcdef",
        "3.13.0",
        "0.12.0",
        "1000000",
        "{'d': 8}",
    ):
        assert made in text
    assert "Started after 0, 100 steps." in text


# ---- what is damaged, or a stranger's ------------------------------------------------------------


LOGS = ("metrics.jsonl", "samples.jsonl", "source/0000000100/provenance.json")


@pytest.mark.parametrize(
    "damage", ["missing", "binary", "json", "directory", "pipe", "link to nothing"]
)
@pytest.mark.parametrize("names", [LOGS, ["config.yaml"]], ids=["logs", "config"])
def test_damaged_files_leave_the_rest_of_the_page(tmp_path, names, damage):
    run = write_run(tmp_path / "run")
    odd = (
        b'[1]\n{"step": []}\n{"step": 1e400}\n{"step": 3, "event": {}}\n"x"\n'
        + b"[" * 10**5
        + b"\n"
    )
    for name in names:
        path = run / name
        path.unlink()
        if damage in ("binary", "json"):
            path.write_bytes(odd if damage == "json" else bytes(range(256)) * 99)
        elif damage == "directory":
            path.mkdir()
        elif damage == "pipe":
            os.mkfifo(path)
        elif damage == "link to nothing":
            path.symlink_to("nothing")
    page = Reader(write_page(run))
    ids = {attributes.get("id") for _, attributes in page.elements}
    assert {"settings", "provenance"} <= ids
    if "config.yaml" in names:
        assert "config.yaml is missing or cannot be read" in page.text
    else:
        assert "metrics.jsonl" in page.text.partition("Settings")[0], (
            "the head says what is missing"
        )


def test_no_text_of_a_plot_ends_its_script():
    panel = Panel("", traces=[{"name": "", "legendgroup": "", "x": ["</script>"]}])
    assert "<" not in as_json(panel.figure)


def test_what_json_lacks_is_null_in_a_plot():
    panel = Panel(
        "", traces=[{"name": "", "x": np.array([1.0, np.nan]), "y": [math.inf, 0.1234567891234]}]
    )
    data = json.loads(as_json(panel.figure), parse_constant=pytest.fail)["data"]
    assert data == [{"name": "", "x": [1, None], "y": [None, 0.123457]}]


EVIL = "\x1b]0;owned\x07\u202e</script><img src=x onerror=alert(1)>{{7*7}}\"'&<b>"
SHOWN = "\ufffd]0;owned\ufffd\ufffd</script><img src=x onerror=alert(1)>{{7*7}}\"'&<b>"


def evil(value):
    """A JSON value with EVIL in each string and key but those that the reader looks for."""
    if isinstance(value, dict):
        found = {key: evil(x) for key, x in value.items() if key not in ("step", "event")}
        return {k: value[k] for k in ("step", "event") if k in value} | found | {EVIL: EVIL}
    if isinstance(value, list):
        return [evil(x) for x in value]
    return value + EVIL if isinstance(value, str) else value


def test_a_strangers_run_is_text(tmp_path):
    run = write_step(write_run(tmp_path / f"run{EVIL}".replace("/", "")))
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        write_lines(
            run / name, [evil(line) for line in lines] + [{"step": 3, "event": EVIL, "why": EVIL}]
        )
    (table,) = run.glob("training_step*.json")
    for path in (
        run / "config.yaml",
        table,
        run / PROFILE / "profile_by_line.json",
        *run.glob("source/*/provenance.json"),
    ):
        path.write_text(json.dumps(evil(json.loads(path.read_text()))))
    (run / f"metrics_{EVIL}.jsonl".replace("/", "")).write_text("")
    plain = [write_step(write_run(tmp_path / name)) for name in "ab"]
    for others in ([], plain[:1]):
        page = write_page(run, *others, output=tmp_path / "evil.html")
        read, expected = (
            Reader(page),
            Reader(write_page(plain[1], *others, output=tmp_path / "plain.html")),
        )

        def kinds(reader):
            return {(tag, name) for tag, attributes in reader.elements for name in attributes}

        assert kinds(read) - kinds(expected) <= {
            ("td", "class"),
            ("th", "title"),
            ("details", "open"),
        }
        assert {tag for tag, _ in read.elements} - {tag for tag, _ in expected.elements} <= {
            "ul",
            "li",
            "thead",
            "th",
        }
        assert not set("\x1b\x07\u202e") & set(page.read_text())
        assert SHOWN.replace("/", "") in read.text
        assert others or read.text.count(SHOWN) > 20


@pytest.mark.long
def test_too_much_is_cut(tmp_path):
    run = write_run(tmp_path / "run")
    write_lines(
        run / "samples.jsonl",
        [{"step": i, "prompt": str(i), "text": "x" * 10**5} for i in range(100)],
    )
    lines = [{"step": i, "loss": 1.0} for i in range(1, 4)]
    write_lines(
        run / "metrics.jsonl", lines + [{"step": 1, "event": "e", "why": "y" * 10**5}] * 500
    )
    page = write_page(run)
    assert page.stat().st_size < 8e6


# ---- how it looks --------------------------------------------------------------------------------


def test_the_page_is_whole_and_fetches_nothing(tmp_path):
    page = write_page(write_step(write_run(tmp_path / "run")))
    read = Reader(page)
    assert not [attributes for tag, attributes in read.elements if tag in ("link", "iframe")]
    assert not [tag for tag, attributes in read.elements if "src" in attributes]
    links = [attributes["href"] for tag, attributes in read.elements if tag == "a"]
    assert {link for link in links if ":" in link or link.startswith("/")} == set()
    assert {
        f"#{section.name}" for section in SECTIONS if section.name not in ("runs", "pairs")
    } <= set(links)
    assert "default-src 'none'" in page.read_text()[:1000]
    assert not [*page.parent.glob("*.tmp")]
    assert page.stat().st_size < 1.5e6


DRAWN = """[...document.querySelectorAll(".plot")].map(plot => {
  const shapes = [...plot.querySelectorAll(".scatterlayer path, .barlayer path, .heatmaplayer image")];
  const box = plot.querySelector("svg.main-svg")?.getBoundingClientRect() ?? {width: 0};
  const largest = Math.max(0, ...shapes.map(x => x.getBoundingClientRect()).map(x => x.width + x.height));
  return {largest, width: box.width, right: box.right};
})"""
GAPS = """[...document.querySelectorAll(".plot")].flatMap(plot => {
  const boxes = [...plot.querySelectorAll(".ytick text")].map(x => x.getBoundingClientRect());
  boxes.sort((a, b) => a.top - b.top);
  return boxes.slice(1).map((box, i) => box.top - boxes[i].bottom);
})"""
CONTRAST = """[...document.querySelectorAll(".plot .xtick text, .plot .legendtext")].map(text => {
  const light = colour => colour.match(/[\\d.]+/g).slice(0, 3).reduce((sum, x) => sum + Number(x) / 765, 0);
  const back = light(getComputedStyle(text.closest("figure")).backgroundColor);
  return Math.abs(light(getComputedStyle(text).fill) - back);
})"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium (Debian: apt install chromium)")
    root = tmp_path_factory.mktemp("runs")
    one, two = write_step(write_run(root / "one")), write_run(root / "two", rate=0.03)
    return {"alone": write_page(one), "several": write_page(one, two, output=root / "report.html")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("which", "width", "scheme"), [("alone", 1280, "light"), ("several", 700, "dark")]
)
def test_the_page_in_a_browser(pages, which, width, scheme):
    ask = f"return [{DRAWN}, {GAPS}, {CONTRAST}, innerWidth, document.documentElement.scrollWidth]"
    drawn, gaps, contrast, inner, whole = seen(pages[which], ask, width=width, scheme=scheme)
    assert len(drawn) == 7
    for plot in drawn:
        assert plot["largest"] > 50, plot
        assert 250 < plot["width"] <= plot["right"] <= width, plot
    assert (inner, whole) == (width, width)
    assert min(gaps) > 0, "labels of an axis overlap"
    assert min(contrast) > 0.25


@pytest.mark.long
def test_plots_follow_clicks_and_each_other(pages):
    ranges = (
        "plots.filter(x => x.dataset.x === 'steps').map(x => "
        "x.layout.xaxis.range.map(Math.round).join())"
    )
    visible = (
        "plots.map(x => x.data.filter(t => t.visible !== false && t.legendgroup === '1').length)"
    )
    ends = "plots.map(x => [x.layout.xaxis.title.text, ...x.data.map(t => [...t.x].pop())])"
    near, before, hidden, tokens = seen(
        pages["several"],
        f"""const pause = () => new Promise(done => setTimeout(done, 500));
        await Plotly.relayout(plots[1], {{'xaxis.range[0]': 20, 'xaxis.range[1]': 40}}); await pause();
        const found = [{ranges}, {visible}];
        document.querySelector('button.run[data-run="1"]').click(); found.push({visible});
        document.querySelector('button.run[data-run="1"]').click();
        document.querySelector('[data-axis^="tokens"]').click(); await pause(); found.push({ends});
        return found""",
    )
    assert set(near) == {"20,40"}
    assert min(before) > 0
    assert set(hidden) == {0}
    assert {x for plot in tokens for x in plot} == {"tokens", 128000}
