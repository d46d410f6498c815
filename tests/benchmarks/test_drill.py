"""The drill can fail: what is planted here as a broken promise is reported, with the command that repeats it."""

import json
import os
import re
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import zarr

from benchmarks.drill import __main__ as drill
from benchmarks.drill import corruptions, kills, ports, runs, settings, stranger_files
from benchmarks.drill.cases import Field, Finding, Kind
from training_io.checkpoint import Checkpointer


def field(path: Path, kind: str, count: int = 1) -> Field:
    (path / kind).mkdir(exist_ok=True)
    return Field(kind, 0, count, path / kind)


# ---- the program ------------------------------------------------------------------------------------------------


@pytest.fixture
def one_kind(monkeypatch):
    """The drill with one kind of fault, of which case 2 breaks a promise and case 3 cannot be played."""

    def play(field: Field, case: int) -> Finding:
        if case == 3:
            raise RuntimeError("no disk")
        return Finding("a fault", ("it was lost",) if case == 2 else ())

    kind = Kind("sparks", 5, 50, "Nothing burns.", play)
    monkeypatch.setattr(drill, "KINDS", {"sparks": kind})


@pytest.mark.quick
def test_a_broken_promise_is_told_with_its_repetition(one_kind, capsys):
    with pytest.raises(SystemExit) as end:
        drill.main(["--seed", "7"])
    assert end.value.code == 1
    said = capsys.readouterr().out
    assert "BROKEN     sparks 2, a fault: it was lost" in said
    assert "RuntimeError: no disk" in said
    assert re.search(r"^\| sparks \| 5 \| Nothing burns. \| 2 \| 7 \|", said, re.MULTILINE)
    (command,) = re.findall(r"python -m benchmarks.drill (.* --case 2)", said)
    with pytest.raises(SystemExit) as end:
        drill.main(command.split())
    assert end.value.code == 1
    assert "it was lost" in capsys.readouterr().out


@pytest.mark.quick
def test_kept_promises_end_with_status_0_and_leave_nothing(one_kind, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(drill.tempfile, "tempdir", None)
    with pytest.raises(SystemExit) as end:
        drill.main(["--count", "2"])
    assert end.value.code == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.quick
def test_the_page_keeps_the_lines_of_other_kinds():
    page = f"# Page\n\n{drill.BEGIN}\n\nold\n| disk | 1 |\n| kills | 2 |\n\n{drill.END}\n\nMore.\n"
    new = drill.with_table(page, {"kills": "| kills | 3 |", "ports": "| ports | 4 |"})
    lines = [line for line in new.splitlines() if line.startswith("| ")]
    assert lines[2:] == ["| kills | 3 |", "| disk | 1 |", "| ports | 4 |"]
    assert new.startswith("# Page\n")
    assert new.endswith("\n\nMore.\n")
    with pytest.raises(ValueError, match="add both marks"):
        drill.with_table("# Page\n", {})


# ---- runs that differ -------------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path) -> Path:
    """What a finished run leaves, as far as it is compared."""
    run = tmp_path / "run"
    for step in (3, runs.STEPS):
        group = zarr.create_group(run / "checkpoints" / f"{step:010}")
        values = np.arange(24, dtype=np.float32) + step
        group.create_array("weights/w", data=values.reshape(4, 6))
    lines = [{"step": i, "loss": 7.0 - i / 8, "tokens": 128 * (i + 1), "seconds": 0.1} for i in range(runs.STEPS)]
    lines.insert(8, {"step": 7, "event": "validation", "loss": 5.0})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "samples.jsonl").write_text('{"step": 8, "text": "a"}\n')
    return run


def copy_of(run: Path) -> Path:
    return shutil.copytree(run, run.with_name("other"))


@pytest.mark.quick
def test_equal_runs_do_not_differ_whatever_their_times(finished):
    other = copy_of(finished)
    text = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(text.replace('"seconds": 0.1', '"seconds": 0.2'))
    assert runs.differences(other, finished) == []
    assert runs.farthest_loss(other, finished) == 0


@pytest.mark.quick
def test_one_bit_of_a_checkpoint_is_seen(finished):
    other = copy_of(finished)
    array = zarr.open_array(other / "checkpoints" / f"{runs.STEPS:010}" / "weights/w", mode="r+")
    array[2, 3] = np.nextafter(array[2, 3], np.float32(np.inf))
    (wrong,) = runs.differences(other, finished)
    assert wrong == f"checkpoint {runs.STEPS} differs in 1 of 1 arrays: weights/w"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("metrics.jsonl", '"loss": 6.875', '"loss": 6.8750001', "steps: entry 1"),
        ("metrics.jsonl", '"loss": 5.0', '"loss": 5.5', "validations: entry 0"),
        ("samples.jsonl", '"a"', '"b"', "samples: entry 0"),
        ("samples.jsonl", '{"step": 8, "text": "a"}\n', "", "samples: entry 0"),
    ],
)
def test_a_line_that_differs_is_seen(finished, file, old, new, told):
    other = copy_of(finished)
    (other / file).write_text((other / file).read_text().replace(old, new, 1))
    (wrong,) = runs.differences(other, finished)
    assert wrong.startswith(told)


@pytest.mark.quick
def test_missing_steps_and_checkpoints_are_seen(finished):
    other = copy_of(finished)
    shutil.rmtree(other / "checkpoints" / f"{runs.STEPS:010}")
    (other / "checkpoints" / f"{3:010}" / "weights" / "w" / "zarr.json").write_text("{")
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(lines[:-1]))
    unreadable, missing, short = runs.differences(other, finished)
    assert unreadable.startswith("checkpoint 3 ")
    assert missing == f"the checkpoint of step {runs.STEPS} is missing; there are [3]"
    assert short.startswith(f"steps: entry {runs.STEPS - 1} is None")
    assert runs.farthest_loss(other, finished) == np.inf


# ---- corruptions --------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path) -> Path:
    return corruptions.pristine(field(tmp_path, "corruptions"))


def checkpointer(restore):
    """A Checkpointer whose restore is `restore(state)` of what the real one restores."""

    class Other(Checkpointer):
        def restore(self, *arguments, **options):
            return restore(super().restore(*arguments, **options))

    return Other


def off_by_one_bit(state):
    w = np.array(state["weights"]["layers"]["w_q"])
    w.view(np.uint32)[1, 2, 3] ^= 1
    state["weights"]["layers"]["w_q"] = jax.device_put(w, state["weights"]["layers"]["w_q"].sharding)
    return state


def failing(error: Exception):
    def restore(state):
        raise error

    return restore


@pytest.mark.parametrize(
    ("restore", "outcome", "told"),
    [
        (lambda state: state, "whole", None),
        (off_by_one_bit, "silent", r"weights/layers/w_q of step 102 restored with other values"),
        (failing(KeyError("shape")), "died", r"KeyError instead of an error with a message"),
        (failing(OSError("something is wrong")), "refused", r"an error that names no array or file"),
        (failing(OSError("the array 'counts' is damaged")), "refused", None),
    ],
)
def test_how_a_restore_ends_is_judged(saved, monkeypatch, restore, outcome, told):
    monkeypatch.setattr(corruptions, "Checkpointer", checkpointer(restore))
    found, wrong = corruptions.judged(saved, corruptions.mesh(d=1, t=4))
    assert found == outcome
    assert (wrong is None) == (told is None)
    assert not told or re.match(told, wrong)


def test_other_metadata_is_seen(saved, monkeypatch):
    monkeypatch.setattr(corruptions, "metadata", lambda step: {"loader": {"sequences": step * 64 + 1}})
    assert corruptions.judged(saved, corruptions.mesh())[0] == "silent"


@pytest.mark.parametrize("corrupt", corruptions.CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_each_corruption_changes_a_copy_alone(corrupt, saved, tmp_path):
    content = lambda root: {str(p.relative_to(root)): p.is_file() and p.read_bytes() for p in sorted(root.rglob("*"))}
    before, changed = content(saved), False
    for case in range(4):
        copy = tmp_path / f"copy{case}"
        shutil.copytree(saved, copy, copy_function=os.link)
        corrupt(corruptions.Target(copy, field(tmp_path, "corruptions").random(case)))
        changed |= content(copy) != before
    assert changed
    assert content(saved) == before


# ---- strangers ----------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.skipif(ports.KIND.missing() is not None, reason="needs Linux's /proc")
def test_listening_ports_are_found():
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("0.0.0.0", 0)) as other:
        found = ports.listening(SimpleNamespace(pid=os.getpid()))
        assert {server.getsockname() for server in (one, other)} <= found
    assert [ports.is_loopback(x) for x in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::")] == [True] * 3 + [
        False
    ] * 2


TALKER = f"""
import pathlib, sys, urllib.request
pathlib.Path("canary").touch()
pathlib.Path("output.html").write_text("<p><img src=x onerror=drill>")
print("{stranger_files.SECRET}", "\\x1b[31m")
try:
    urllib.request.urlopen(pathlib.Path("url").read_text(), timeout=5)
except OSError:
    pass
raise KeyError("secret")
"""


def test_a_tool_that_lets_a_stranger_in_is_reported(tmp_path, monkeypatch):
    def given(directory: Path, url: str) -> None:
        home = directory.parents[1]
        (home / "talker.py").write_text(TALKER)
        (home / "url").write_text(url)

    def harmless(directory: Path, url: str) -> None:
        (directory.parents[1] / "talker.py").write_text("raise SystemExit('Error: refused')")

    (tmp_path / "run").mkdir()
    monkeypatch.setattr(stranger_files, "unkilled", lambda *_: tmp_path / "run")
    monkeypatch.setattr(stranger_files, "commands", lambda: {"talker": ["talker"]})
    monkeypatch.setattr(stranger_files, "PAIRS", [(given, "talker"), (harmless, "talker")])
    found = [stranger_files.play(field(tmp_path, "files", 2), case) for case in range(2)]
    told = ("was executed", "heard 'GET / HTTP", "a secret", "a traceback", "control character", "markup")
    assert len(found[0].wrong) == len(told)
    assert all(part in wrong for part, wrong in zip(told, found[0].wrong, strict=True))
    assert found[1].wrong == ()


# ---- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("said", "code", "wrong"),
    [
        ("400 mistakes, 0 answered badly\n", 0, 0),
        ("train a=1\n  a traceback (1.0 s)\n    Traceback\n400 mistakes, 1 answered badly\n", 1, 1),
        ("400 mistakes, 0 answered badly\n", 1, 1),
        ("", 0, 1),
    ],
)
def test_answers_to_bad_settings_are_counted(tmp_path, monkeypatch, said, code, wrong):
    done = SimpleNamespace(stdout=said, stderr="", returncode=code)
    monkeypatch.setattr(settings.subprocess, "run", lambda *_, **__: done)
    finding = settings.play(field(tmp_path, "settings", 400), 0)
    assert len(finding.wrong) == wrong
    assert finding.faults == (400 if said else 0)


# ---- kills ----------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("count", [1, 3, 10, 37, 120])
def test_all_kills_are_in_some_case(count):
    assert sum(kills.kills_of(count, case) for case in range(kills.cases(count))) == count


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True])
def test_a_resume_that_is_not_equal_is_reported(tmp_path, monkeypatch, breaks):
    """Resumed on another mesh, a run has other sums: not equal to the bit."""

    class Resumed(runs.Start):
        def __init__(self, directory, mesh, *overrides, **options):
            other = breaks and bool(runs.checkpoints(directory))
            super().__init__(directory, runs.Mesh(1, 4, 1) if other else mesh, *overrides, **options)

    # Killed as soon as a checkpoint is whole: before that, the run would begin again on its own mesh.
    saved = lambda start, when, draw: start.wait_until(lambda: runs.checkpoints(start.directory))
    monkeypatch.setattr(kills, "Start", Resumed)
    monkeypatch.setattr(kills, "moment", lambda draw: "saving")
    monkeypatch.setattr(kills, "wait_for_moment", saved)
    finding = kills.play(field(tmp_path, "kills"), 0)
    assert finding.outcomes == ("one process, saving",)
    assert bool(finding.wrong) == breaks, finding
