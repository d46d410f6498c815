"""Programs that a run starts beside itself."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwright.program.background import in_background, run_beside, wait_for

PATIENT = (
    "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with programs that a process of its own finds."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "a_patient_program.py").write_text(PATIENT)
    return tmp_path


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
def test_it_dies_with_a_run_that_is_killed(folder):
    starts = (
        "from shardwright.program.background import run_beside; run_beside('a_patient_program')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starts],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path) + f":{folder}"},
    ) as run:
        pid = pid_of(folder)
        assert is_alive(pid)
        run.kill()
    end = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(pid)


def test_a_wait_says_what_for_and_a_signal_ends_it(folder, capsys):
    def draw() -> str:
        try:
            return run_beside("a_patient_program", directory=folder)
        except RuntimeError as error:
            return str(error)

    def stopped_by() -> str | None:
        return signal.Signals.SIGINT.name if "waiting" in said() else None

    printed = []

    def said() -> str:
        printed.append(capsys.readouterr().out)
        return "".join(printed)

    other = in_background(run_beside, "http.server", "0", "--bind", "127.0.0.1")
    drawing = in_background(draw)
    pid_of(folder)
    began = time.monotonic()
    wait_for([drawing], "the picture", stopped_by)
    assert time.monotonic() - began < 30
    assert drawing.result() == "it was killed"
    concurrent.futures.wait([other], timeout=0.5)
    assert not other.done(), "only the program that is waited for is killed"
    other.kill_program()
    assert str(other.exception()) == "it was killed"
    assert said() == "waiting    for the picture; Ctrl-C skips it\n"
