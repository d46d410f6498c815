"""The page that a run keeps: when it is made, by which process, and what becomes of one that cannot be made."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
import tiny
from written_runs import write_run

import train
from shardwright.modeling.model import load_model
from shardwright.run import page as pages
from shardwright.run.page import Page
from shardwright.run.run import Run
from tools.report.reading import read_run

ROOT = Path(__file__).parents[2]


def wait(page: Page) -> None:
    page._process.wait(60)


@pytest.fixture
def slow(tmp_path, monkeypatch) -> Path:
    """In place of Python a program that writes its process id and waits. The file that it writes."""
    script = tmp_path / "slow.sh"
    script.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/started\n> report.html.$$.tmp\nexec sleep 60\n")
    script.chmod(0o700)
    monkeypatch.setattr(pages.sys, "executable", str(script))
    monkeypatch.setattr(pages, "FIRST_S", 0.0)
    return tmp_path / "started"


def test_the_last_page_is_waited_for(tmp_path, capsys):
    run = write_run(tmp_path / "a 'run', [of] {mine}=é, $x")
    page = Page(run, wanted=True)
    assert page.finish() == run / "report.html"
    assert "It is a truth" in (run / "report.html").read_text()
    assert capsys.readouterr().out == ""
    (run / "report.html").write_text("")
    assert Page(run, wanted=False).finish() is None
    assert (run / "report.html").read_text() == ""


@pytest.mark.long
def test_the_program_is_this_project_s_and_needs_no_jax(tmp_path, monkeypatch):
    """Not a `tools` in the directory where the run was started."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("raise SystemExit('another')")
    monkeypatch.chdir(tmp_path)
    assert Page(write_run(tmp_path / "run"), wanted=True).finish()
    program = "import sys, tools.report.__main__; print({'jax', 'zarr'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_one_process_of_the_lowest_priority_at_a_time(tmp_path, slow):
    page = Page(tmp_path, wanted=True)
    for _ in range(50):
        page.refresh()
        time.sleep(0.01)
    (process,) = map(int, slow.read_text().split())
    assert os.getpriority(os.PRIO_PROCESS, process) == 19
    page.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.long
def test_pages_are_a_minute_apart_and_take_a_share_of_the_time(tmp_path, monkeypatch):
    now, starts = 1000.0, []
    monkeypatch.setattr(pages.time, "monotonic", lambda: now)
    page = Page(write_run(tmp_path / "run"), wanted=True)
    page._start = lambda: (starts.append(now), start())
    start = lambda: Page._start(page)
    seconds = {0: 1, 1: 1, 2: 9}  # that the first processes take
    for _ in range(600):
        page.refresh()
        if page._process is not None and now >= starts[-1] + seconds.get(len(starts) - 1, 1):
            wait(page)
        now += 1
    # The third took nine seconds, and one more until it was seen: 30 times ten.
    assert starts == [1010, 1070, 1130, 1430, 1490, 1550]


def test_one_that_takes_too_long_is_ended(tmp_path, slow, monkeypatch, capsys):
    monkeypatch.setattr(pages, "TIMEOUT_S", 0.2)
    page = Page(tmp_path, wanted=True)
    page.refresh()
    time.sleep(0.3)
    page.refresh()
    assert page.finish() is None
    assert capsys.readouterr().out == "report     none: it took longer than 0.2 s\n", "once"
    for process in map(int, slow.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert not [*tmp_path.glob("report.html*")]


@pytest.mark.long
def test_why_there_is_no_page_is_told_once(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run")
    (run / "report.html").symlink_to("elsewhere")
    page = Page(run, wanted=True)
    assert page.finish() is None
    assert page.finish() is None
    out = capsys.readouterr().out
    assert out == "report     none: report.html is a link, or no file. Remove it, or give output=<file>.\n"
    monkeypatch.setattr(pages.sys, "executable", str(tmp_path / "no python"))
    assert Page(run, wanted=True).finish() is None
    assert capsys.readouterr().out == "report     none: No such file or directory\n"


# ---- of a real run ------------------------------------------------------------------------------------------------


def trained(directory: Path, **changes) -> str | None:
    """A run of five tiny steps that keeps its page. Returns what train.train does."""
    c = tiny.config(tiny.model(vocab=1280, layers=1))
    c.data.filespec = str(ROOT / "synthetic_dataset.zarr")
    settings = {"steps": 5, "report": True, "eval_batches": 1, "checkpoint_interval": 2} | changes
    c.training = dataclasses.replace(c.training, **settings)
    directory.mkdir(exist_ok=True)
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        return train.train(c, load_model(c.model), directory)


@pytest.mark.slow
def test_the_page_of_a_run_that_finishes_and_is_continued(tmp_path, capsys):
    trained(tmp_path / "run")
    *out, last = capsys.readouterr().out.splitlines()
    assert last == f"report     {tmp_path}/run/report.html  (open it in a browser)"
    (entropy,) = (float(line.split()[1]) for line in out if line.startswith("unigram "))
    r = read_run(tmp_path / "run", 50)
    assert (r.state, r.total_steps, r.fact("mesh")) == ("finished", 5, {"r": 1, "d": 4, "t": 2})
    assert r.fact("unigram_entropy") == pytest.approx(entropy, abs=5e-4)
    assert (r.about["defaults"]["training.seed"], r.about["overrides"]) == (0, None)
    assert ">finished<" in (tmp_path / "run" / "report.html").read_text()
    trained(tmp_path / "run", steps=7)
    r = read_run(tmp_path / "run", 50)
    assert (r.state, r.total_steps, [start for start, _ in r.starts]) == ("finished", 7, [0, 5])
    assert ">resumed<" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_the_page_of_a_run_that_fails(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is gone\nfor ever")

    monkeypatch.setattr(Run, "save", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        trained(tmp_path / "run")
    r = read_run(tmp_path / "run", 50)
    assert (r.state, r.why, len(r.step)) == ("failed", "OSError: the disk is gone", 2)
    assert "OSError: the disk is gone" in (tmp_path / "run" / "report.html").read_text()
