"""Programs that a run starts beside itself, and the page that one of them keeps."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwright.run.page import Page
from tests.tools.written_runs import write_run

PATIENT = (
    "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
)


def pid_of(folder: Path) -> int:
    end = time.monotonic() + 30
    while not (text := (folder / "pid").read_text() if (folder / "pid").exists() else ""):
        assert time.monotonic() < end
        time.sleep(0.05)
    return int(text)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux ends a process with the one that started it"
)
def test_it_dies_with_a_run_that_is_killed(tmp_path):
    (tmp_path / "a_patient_program.py").write_text(PATIENT)
    starts = (
        "from shardwright.program.background import run_beside; run_beside('a_patient_program')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starts],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ":".join([*sys.path, str(tmp_path)])},
    ) as run:
        pid = pid_of(tmp_path)
        assert is_alive(pid)
        run.kill()
    end = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(pid)


# ---- the page of a run ---------------------------------------------------------------------------


@pytest.mark.long
def test_the_last_page_is_waited_for(tmp_path):
    run = write_run(tmp_path / "a 'run', [of] {mine}=é, $x")
    (run / "json.py").write_text("raise SystemExit('not this one')")
    assert Page(run, wanted=True).finish() == run / "report.html"
    assert "It is a truth" in (run / "report.html").read_text()
