"""Trackers get the numbers of metrics.jsonl, as their own files show, and never stop a run."""

import importlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shardwright.program import trackers
from shardwright.program.trackers import (
    TrackersConfig,
    check_installed,
    tracked,
)

ROOT = Path(__file__).parents[2]

FIRST = [
    {"step": 1, "loss": 5.5, "unix_time": 1.5e9, "grad_norm": 2.0, "size": [1.0, 2.0]},
    {"step": 2, "loss": "NaN", "grad_norm": 3.0, "tokens": 128},
    {"step": 2, "event": "validation", "loss": 4.25, "of": "tiny"},
]
LATER = [{"step": 3, "loss": 3.5, "tokens": 192}, {"step": 1, "event": "memory", "peak": 0.25}]
EXPECTED = {
    ("loss", 1): 5.5,
    ("grad_norm", 1): 2.0,
    ("size/0", 1): 1.0,
    ("size/1", 1): 2.0,
    ("grad_norm", 2): 3.0,
    ("validation/loss", 2): 4.25,
    ("loss", 3): 3.5,
    ("tokens", 3): 192.0,
    ("memory/peak", 1): 0.25,
}


def of_tensorboard(directory, _):
    event_pb2 = importlib.import_module("tensorboardX.proto.event_pb2")
    found = {}
    for path in sorted(directory.glob("events.out.tfevents*")):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            found |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
    return found


def of_wandb(directory, _):
    pb2 = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found, ids = {}, set()
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        ids.add(path.stem)
        data, record, place = path.read_bytes(), b"", 7
        while place + 7 <= len(data):
            # a log of LevelDB: blocks of 32 KiB with records, which may be cut at their ends
            if 2**15 - place % 2**15 < 7:
                place += 2**15 - place % 2**15
                continue
            length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
            part, place = data[place + 7 : place + 7 + length], place + 7 + length
            record = part if kind in (1, 2) else record + part
            if kind in (1, 4) and record:
                items = pb2.Record.FromString(record).history.item
                values = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
                found |= {(name, values["step"]): x for name, x in values.items()}
    assert len(ids) == 1, "a resumed run goes on in the same run of the tracker"
    return found


def of_clearml(_, known):
    cache = importlib.import_module("clearml.config").get_offline_dir(known)
    with zipfile.ZipFile(f"{cache}.zip") as archive:
        lines = [json.loads(line) for line in archive.read("metrics.jsonl").decode().splitlines()]

    def join(m):
        return m["metric"] if m["metric"] == m["variant"] else f"{m['metric']}/{m['variant']}"

    return {(join(m), m["iter"]): m["value"] for line in lines for m in line}


READ = {"tensorboard": of_tensorboard, "wandb": of_wandb, "clearml": of_clearml}


START = """
import json, sys
from pathlib import Path
from shardwright.program.trackers import TrackersConfig, tracked
name, directory, start, lines = json.loads(sys.argv[1])
with tracked(TrackersConfig([name], "ours"), Path(directory), "tiny", start, {"model": {"layers": 2}}) as send:
    for line in lines:
        send(line)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", READ)
@pytest.mark.filterwarnings("ignore")  # of the trackers
def test_a_tracker_has_the_numbers_of_both_starts_of_a_run(name, tmp_path, monkeypatch):
    if importlib.util.find_spec(trackers.TRACKERS[name][0]) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("CLEARML_OFFLINE_MODE", "1")
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "clearml"))
    directory = tmp_path / "run"
    directory.mkdir()
    for start, lines in ((0, FIRST), (2, LATER)):
        command = [sys.executable, "-c", START, json.dumps([name, str(directory), start, lines])]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    known = json.loads((directory / trackers.FILE).read_text())[name]
    found = READ[name](directory, known)
    assert {key: found.get(key) for key in EXPECTED} == EXPECTED


class Fake:
    """A tracker that fails at a chosen call."""

    def __init__(self, fails, kind=RuntimeError):
        self.fails, self.kind, self.lines, self.closed = fails, kind, [], False

    def open(self, package, facts):
        self._fail("open")
        return trackers.Opened("its name", self.log, self.close)

    def close(self):
        self._fail("close")
        self.closed = True

    def log(self, values, step):
        self._fail("log")
        self.lines.append((step, values))

    def _fail(self, what):
        if self.fails == what:
            raise self.kind(f"no\nnetwork in {what}\x1b[2J")


@pytest.mark.parametrize("fails", ["open", "log", "close"])
def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(
    fails, tmp_path, monkeypatch, capsys
):
    kind = SystemExit if fails == "log" else RuntimeError
    bad, good = Fake(fails, kind), Fake(None)
    named = {"fake0": ("json", bad.open), "fake1": ("json", good.open)}
    monkeypatch.setattr(trackers, "TRACKERS", named)
    with tracked(TrackersConfig(list(named)), tmp_path, "tiny", 0, {}) as send:
        for line in FIRST:
            send(line)
    assert [step for step, _ in good.lines] == [1, 2, 2]
    assert good.closed
    assert bad.closed == (fails == "log")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("WARNING: the tracker fake0 failed: ")
    assert f"{kind.__name__}: no network in {fails}\N{REPLACEMENT CHARACTER}[2J" in line


def test_a_tracker_of_ones_own_file(tmp_path):
    line = {"step": 3, "loss": 1.5}
    own = TrackersConfig(["tests.support.own_parts:tracker"])
    with tracked(own, tmp_path, "name", 0, {}) as send:
        send(line)
    assert json.loads((tmp_path / "tests.support.own_parts.jsonl").read_text()) == line
    with pytest.raises(
        ValueError, match=r"'os:system' is not a tracker: .* Write a function of \(package, run\)"
    ):
        check_installed(TrackersConfig(["os:system"]))
