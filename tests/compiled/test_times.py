"""The time by source line: of traces made by hand, whose times are known, and of a real one."""

import json

import jax
import pytest
from hlo_texts import TEXT
from jax.profiler import ProfileData
from step_text import table_of
from traces import trace

from shardwright.compiled.hlo import parse
from shardwright.compiled.times import line_times, top_lines
from shardwright.compiled.trace import read_trace

# jaxlib's reader of traces makes a type in a way that Python 3.13 warns of; as an error, that would end the process.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
SOURCE = {"train.py:10": "x = gather(x)", "train.py:20": "y = x @ w"}


def times(planes, text=TEXT):
    table = table_of(text)
    table.source.update(SOURCE)
    return line_times(trace(planes), parse(text), table)


def by_line(found):
    return {row["line"]: [round(row[key], 6) for key in ("seconds", "share", "collective", "exposed")]
            for row in found["lines"]}  # fmt: skip


def on_cpu(device, *events):
    of = {"hlo_module": "jit_f", "run_id": 7, "device_ordinal": device}
    return [(start, end, name, of | {"hlo_op": name}) for start, end, name in events]


def test_a_collective_in_groups_of_one_device_is_a_copy():
    text = TEXT.replace("replica_groups={{0,1,2,3}}", "replica_groups={{0},{1},{2},{3}}")
    events = {"/host:CPU": {"a": on_cpu(0, (0, 5e6, "total"))}}
    assert by_line(times(events))["train.py:20"] == [5, 1, 1, 1]
    assert by_line(times(events, text))["train.py:20"] == [5, 1, 0, 0]


def test_cpu_devices():
    """Device 0: a loop of 100 s around collectives of 30 and 20 s, of which a product beside them covers 10 s; the loop
    itself is no work. Device 1: 50 s of a program's operation without a line."""
    second = 1e6
    at = lambda start, end, name: (start * second, end * second, name)
    threads = {
        "a": on_cpu(0, at(0, 100, "loop"), at(10, 40, "half"), at(50, 70, "again")),
        "b": on_cpu(0, at(60, 90, "product"), at(95, 100, "total")) + on_cpu(1, at(0, 50, "unknown")),
        "python": [(0, 9e6, "$f.py:1 f", {"hlo_module": "jit_f", "hlo_op": "half", "device_ordinal": 0})],
        "other": [(0, 9e6, "half", {"hlo_module": "jit_g", "hlo_op": "half", "device_ordinal": 0})],
    }
    found = times({"/host:CPU": threads})
    total = 30 + 20 + 30 + 5 + 50
    assert found["devices"] == 2
    assert found["seconds"] == pytest.approx(total)
    assert sum(row["seconds"] for row in found["lines"]) == pytest.approx(total)
    assert by_line(found) == {
        "without a line": [50, round(50 / total, 6), 0, 0],
        "train.py:10": [50, round(50 / total, 6), round(50 / total, 6), round(40 / total, 6)],
        "train.py:20": [35, round(35 / total, 6), round(5 / total, 6), round(5 / total, 6)],
    }
    assert found["exposed"] == pytest.approx(45 / total)


def test_gpu_streams():
    """Two streams compute at the same time; a third communicates for 20 ns longer."""
    of = lambda name: {"hlo_module": "jit_f", "hlo_op": name}
    lines = {
        "Stream #1(Compute)": [(0, 40, "gemm", of("product")), (40, 45, "memset", {})],
        "Stream #2(NCCL)": [(30, 60, "ncclDevKernel", of("start"))],
        "Stream #3(Compute)": [(10, 35, "gemm", of("product"))],
    }
    found = times({"/device:GPU:0": lines, "/device:GPU:1": {"Stream #1": []}, "/host:CPU": {"python": []}})
    assert found["devices"] == 1
    assert by_line(found) == {
        "train.py:20": [65e-6, round(65 / 95, 6), 0, 0],
        "train.py:10": [30e-6, round(30 / 95, 6), round(30 / 95, 6), round(20 / 95, 6)],
    }


def test_a_line_of_operations():
    """As TPUs have it: an operation is named by its whole instruction. Those outside of the program are others."""
    lines = {
        "XLA Modules": [(0, 100, "jit_f(12)", {}), (100, 200, "jit_g(13)", {})],
        "XLA Ops": [(10, 30, "%product = f32[8,16] fusion(%a)", {}), (110, 190, "product", {})],
    }
    found = times({"/device:TPU:0": lines})
    assert by_line(found) == {"train.py:20": [20e-6, 1, 0, 0]}


def test_a_trace_of_another_program_is_told():
    with pytest.raises(ValueError, match="the trace has no operation of jit_f"):
        times({"/host:CPU": {"python": []}})


def test_top_lines_fit_the_terminal():
    rows = [{"line": f"models/a_long_name.py:{i}", "text": "x" * 80, "seconds": 1, "share": 0.05, "collective": i % 2,
             "exposed": 0.012} for i in range(20)]  # fmt: skip
    lines = top_lines({"devices": 8, "seconds": 1.5, "collective": 0.5, "exposed": 0.25, "lines": rows}).splitlines()
    assert len(lines) == 3 + 10
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "slowest    source lines, by their share of the time that devices work"
    assert lines[1] == "           waits: for data of other devices; 25.0% of all that time"
    assert lines[2] == "  time   waits  line"
    assert lines[3].startswith("  5.0%          models/a_long_name.py:0  xxx")
    assert lines[4].startswith("  5.0%    1.2%  models/a_long_name.py:1  xxx")


def test_the_larger_of_two_matmuls_takes_longer(tmp_path):
    """A product of ten times the FLOPs, on a line of its own."""

    @jax.jit
    def traced(x, small, large):
        y = x @ small
        return y @ large

    key = jax.random.key(0)
    x, small, large = (jax.random.normal(key, shape) for shape in ((512, 512), (512, 512), (512, 5120)))
    compiled = traced.lower(x, small, large).compile()
    jax.block_until_ready(compiled(x, small, large))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(tmp_path, profiler_options=options)
    for _ in range(5):
        jax.block_until_ready(compiled(x, small, large))
    jax.profiler.stop_trace()
    (path,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    text = tmp_path / "step.txt"
    text.write_text(compiled.as_text())
    found = read_trace(path, "jit_traced", 5, text)["lines"]
    first = traced.__wrapped__.__code__.co_firstlineno + 2
    share = {int(row["line"].rpartition(":")[2]): row["share"] for row in found["lines"] if ":" in row["line"]}
    assert share[first + 1] > 3 * share[first]
    assert sum(row["share"] for row in found["lines"]) == pytest.approx(1)
    assert next(row["text"] for row in found["lines"]) == "return y @ large"
    assert json.loads(path.with_name("profile_by_line.json").read_text()) == found
    assert found["steps"] == 5
    profile = ProfileData.from_file(str(path))
    events = [
        event.duration_ns / 1e9
        for plane in profile.planes
        for line in plane.lines
        for event in line.events
        if dict(event.stats).get("hlo_module") == "jit_traced" and "hlo_op" in dict(event.stats)
    ]
    assert found["seconds"] == pytest.approx(sum(events), rel=0.05)  # no loop: each operation once


def test_without_the_text_the_rest_is_read(tmp_path):
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(b"")
    found = read_trace(path, "jit_f", 2, None)
    assert found["lines"] == {"because": "there is no HLO text of the step"}
    assert "because" in found["bubble"]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
