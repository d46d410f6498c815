"""The page of tools.report: what it says of a run, whole, damaged or a stranger's; and how it
looks, in Chromium.
"""

import json
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardwright.tools.report.__main__ import Settings, show_report
from shardwright.tools.report.lines import step_by_line
from shardwright.tools.report.reading import read_run
from tests.tools.written_runs import (
    HLO,
    PROFILE,
    write_lines,
    write_run,
    write_step,
)

LINES = f"{PROFILE}/profile_by_line.json"


def write_page(*directories: Path, output: Path | None = None) -> Path:
    given = Settings(run=[*map(str, directories)], output=output and str(output))
    with open(os.devnull, "w") as nothing:
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


@pytest.fixture
def run(tmp_path) -> Path:
    return write_step(write_run(tmp_path / "run"))


SAID = [
    "run · stopped run stopped {0} Stopped: SIGTERM 80.0% loss 2.595 training loss",
    "val 2.651 the last",
    "bits/byte 1.326 the same",
    "tokens/s 1.38k of the median step MFU 120.0% of the median step",
    "memory ~3.00 MiB peak",
    "idle 1.23% share",
    "steps 200/250 done tokens 128k seen in training time 0:01:40 of the steps",
    "unfinished: 200 of 250 steps loss not finite at 1 step, first at step 91 Curves",
    "x axis: steps tokens minutes of training Loss, nats a token Norm of the gradients Learning "
    "rate Tokens/s noise pair stream Planned",
    "planned for v5emeasuredratio time of a step400.00 ms (320.00 ms to 500.00 ms)500.00 ms1.25 "
    "tokens/s1.60k (1.28k to 2.00k)1.38k0.863 MFU50.0% (40.0% to 62.5%)120.0%2.4 "
    "memory2.00 MiB~3.00 MiB1.5 The ratio",
    # (1.2 + 0.08) s and 0.32 s of 8 devices and 2 steps; a fourth of the collective is exposed. Of
    # 8 devices, each sends 7/8 of the 16 KiB of each of both.
    "a device sends 38.0 KiB. Matmuls: a device multiplies 24.0 MFLOP",
    "~train.py:20y = x @ w 80.0% 100.0080.000.824.0 MFLOP 100×100×100 bf16 (planned 24.0 MFLOP) "
    'layers, forward × 1 × 12 kept (planned 64 B) train.py:10w = gather("M/d -> M", w) 20.0% '
    "16.0020.001.254.005.0036.0 KiB all-gather t d, not overlapped (planned 28.0 KiB) layers, "
    "forward × 3 × 122.00 KiB reduce-scatter t, overlapped outside of loops train.py:30 0.0% 3.00 "
    "training_step_optimized_hlo_2026_01_01_00_00_00.svg the picture",
    "Statistics of step 101, the last of 2 looks",
    "Llama.layer gate train.py:159 1.5 – 4.5 8 0% 0% 0% – 50% Weights 1",
    "embed 0.125 2 0.0625 0.00248 inf 0.3% What",
    "91skippedthe loss is NaN; batch 90 100resumed 200stoppedSIGTERM Samples",
    "from the beginning of a document step 0It is a truth 0 and more step 10It is a truth 10 and "
    "more step 30It is a truth 30 and more",
    "step 200It is a truth 200 and more ∎ 9 steps between these are in samples.jsonl. Emma",
    "optimizer.learning_rate0.01 optimizer.warmup_steps1100 training.batch_size8",
    'Defaults 2 settingvaluedefault model.module"train""train" training.seed00 Provenance',
    "python -m train --config-name=tiny optimizer.learning_rate=0.01 started2026-01-01T01:00:00Z "
    "commit0123456789abcdef Python3.13.0 jax0.12.0 numpy2.4.6 parameters1000000 devices8 x cpu "
    "mesh{{'d': 8}} peak FLOPsmeasured here Started after 0, 100 steps.",
]


def test_the_page_of_a_run_is_whole_and_fetches_nothing(run):
    page = write_page(run)
    read, at = Reader(page), 0
    for words in SAID:
        at = read.text.index(words.format(run), at)
    assert not [attributes for tag, attributes in read.elements if tag in ("link", "iframe")]
    assert not [tag for tag, attributes in read.elements if "src" in attributes]
    links = [attributes["href"] for tag, attributes in read.elements if tag == "a"]
    assert not [link for link in links if ":" in link or link.startswith("/")]
    ids = {f"#{attributes['id']}" for _, attributes in read.elements if "id" in attributes}
    assert {link for link in links if link.startswith("#")} - {"#"} <= ids
    assert f"{HLO}.svg" in links
    assert "default-src 'none'" in page.read_text()[:1000]
    assert not [*page.parent.glob("*.tmp")]
    assert page.stat().st_size < 1.5e6


@pytest.mark.parametrize(
    ("end", "lock", "steps", "state"),
    [
        ({"state": "finished"}, None, 4, "finished"),
        ({"state": "stopped"}, {"pid": os.getpid(), "host": os.uname().nodename}, 2, "stopped"),
        ({"state": "<b>"}, None, 2, "unknown"),
        # it saves and validates
        (None, {"pid": os.getpid(), "host": os.uname().nodename}, 4, "running"),
        (None, {"pid": 1, "host": "another"}, 2, "running"),
        # a larger one than Linux gives
        (None, {"pid": 2**22 + 1, "host": os.uname().nodename}, 2, "broke off"),
        (None, None, 2, "broke off"),
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


# ---- the step by source line ---------------------------------------------------------------------


TIME = {"line": "a", "text": "", "seconds": 1, "share": 7, "collective": 0, "exposed": -1}
LACKING = [{"line": "train.py:10", "kind": "collective", "seconds": 1.0, "exposed": 0.0}]


def link_to_a_secret(path: Path) -> None:
    """To a file that the page must not have."""
    path.symlink_to(path.rename(path.parents[4] / "secret"))


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" " * 2**27)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        (f"{HLO}.json", {"mesh": {"d": -1}}, "a number in it is out of range"),
        (f"{HLO}.json", lambda path: path.write_bytes(b"[" * 10**5), f"{HLO}.json"),
        (f"{HLO}.json", pipe, ""),
        (LINES, {"lines": [TIME]}, "a number of the profile is out of range"),
        (LINES, longer, "profile_by_line.json"),
        (LINES, link_to_a_secret, ""),
        ("plan.json", {"work": [{"line": 3}]}, "plan.json"),
        ("plan.json", {"mesh": {"d": 0, "t": -2}, "work": LACKING}, ""),
        ("plan.json", {"seconds": -1e999, "mfu": "x", "tokens_per_second": 10**400}, ""),
    ],
)
def test_damaged_files_of_a_step_leave_the_rest_of_the_page(run, name, change, problem):
    if callable(change):
        change(run / name)
    else:
        (run / name).write_text(json.dumps(json.loads((run / name).read_text()) | change))
    found = step_by_line(read_run(run))
    assert len(found["problems"]) == bool(problem)
    assert problem in "".join(found["problems"])
    assert found["first"]
    text = Reader(write_page(run)).text
    assert "The step by source line" in text
    assert not problem or Path(name).name in text


@pytest.mark.quick
def test_the_report_needs_no_jax():
    code = "import sys, tools.report.__main__; print({'jax', 'jaxlib'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# ---- what is damaged, or a stranger's ------------------------------------------------------------


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
    """On the page, and on the terminal, where rich would obey it too."""
    run = write_step(write_run(tmp_path / f"[bold]{EVIL}".replace("/", "")))
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = [evil(json.loads(line)) for line in (run / name).read_text().splitlines()]
        write_lines(run / name, [*lines, {"step": 3, "event": EVIL, "why": EVIL}])
    (table,) = run.glob("training_step*.json")
    for path in (run / "config.yaml", table, run / LINES, *run.glob("source/*/provenance.json")):
        path.write_text(json.dumps(evil(json.loads(path.read_text()))))
    plain = [write_step(write_run(tmp_path / name)) for name in "ab"]
    added = {("td", "class"), ("th", "title"), ("details", "open")}
    for others in ([], plain[:1]):
        page = write_page(run, *others, output=tmp_path / "evil.html")
        expected = Reader(write_page(plain[1], *others, output=tmp_path / "plain.html"))
        read = Reader(page)

        def kinds(reader):
            return {(tag, name) for tag, attributes in reader.elements for name in attributes}

        assert kinds(read) - kinds(expected) <= added
        tags = {tag for tag, _ in read.elements} - {tag for tag, _ in expected.elements}
        assert tags <= {"ul", "li", "thead", "th"}
        assert not set("\x1b\x07\u202e") & set(page.read_text())
        assert SHOWN.replace("/", "") in read.text
        assert others or read.text.count(SHOWN) > 20
    with open(os.devnull, "w") as nothing:
        console = Console(file=nothing, record=True, width=200)
        show_report(Settings(run=str(run)), console)
    text = console.export_text()
    assert not set("\x1b\x07\u202e") & set(text)
    assert f"[bold]{SHOWN}".replace("/", "") in text


# ---- how it looks --------------------------------------------------------------------------------


NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --hide-scrollbars --disable-dev-shm-usage --dump-dom "
    "--enable-logging=stderr --virtual-time-budget=30000"
)
ASK = """<script>addEventListener("load", () => setTimeout(async () => {
  const found = await (async () => {%s})();
  document.body.replaceChildren(JSON.stringify(found));
}, 500))</script>"""


def seen(page: Path, program: str, *, width: int = 1280) -> Any:
    """What a JavaScript function with this body, which may await, returns on a copy of an HTML
    file, half a second after it is drawn in a window of `width` pixels, at least 500.

    Raises:
        AssertionError: the page wrote to the console, or an exception was not caught.
    """
    copy = page.with_name(f"{page.stem}_asked.html")
    copy.write_text(page.read_text() + ASK % program)
    command = [CHROMIUM, *FLAGS.split(), f"--window-size={width},900", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "CONSOLE" not in done.stderr, done.stderr
    return json.loads(done.stdout.partition("<body>")[2].partition("</body>")[0])


DRAWN = """[...document.querySelectorAll(".plot")].map(plot => {
  const shapes = [...plot.querySelectorAll(".scatterlayer path, .barlayer path, .heatmaplayer image")];
  const box = plot.querySelector("svg.main-svg")?.getBoundingClientRect() ?? {width: 0};
  const largest = Math.max(0, ...shapes.map(x => x.getBoundingClientRect()).map(x => x.width + x.height));
  return {largest, width: box.width, right: box.right};
})"""


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)")
def test_plots_fit_a_narrow_window_and_follow_clicks_and_each_other(tmp_path):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", rate=0.03)
    page = write_page(one, two, output=tmp_path / "report.html")
    shown = "plots.filter(x => x.dataset.x === 'steps')"
    ranges = f"{shown}.map(x => x.layout.xaxis.range.map(Math.round).join())"
    own = "t.visible !== false && t.legendgroup === '1'"
    visible = f"plots.map(x => x.data.filter(t => {own}).length)"
    ends = "plots.map(x => [x.layout.xaxis.title.text, ...x.data.map(t => [...t.x].pop())])"
    drawn, whole, near, before, hidden, tokens = seen(
        page,
        f"""const found = [{DRAWN}, document.documentElement.scrollWidth];
        const pause = () => new Promise(done => setTimeout(done, 500));
        await Plotly.relayout(plots[1], {{'xaxis.range[0]': 20, 'xaxis.range[1]': 40}}); await pause();
        found.push({ranges}, {visible});
        document.querySelector('button.run[data-run="1"]').click(); found.push({visible});
        document.querySelector('button.run[data-run="1"]').click();
        document.querySelector('[data-axis^="tokens"]').click(); await pause(); found.push({ends});
        return found""",
        width=700,
    )
    assert (len(drawn), whole) == (7, 700)
    for plot in drawn:
        assert plot["largest"] > 50, plot
        assert 250 < plot["width"] <= plot["right"] <= 700, plot
    assert set(near) == {"20,40"}
    assert min(before) > 0
    assert set(hidden) == {0}
    assert {x for plot in tokens for x in plot} == {"tokens", 128000}
