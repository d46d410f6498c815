"""Times of the devices: from traces made by hand, whose times are known, and from real ones of CPU
devices.

Those of GPUs and TPUs have the form in which XLA's profiler writes them (its sources name these
planes, lines and stats). The last ones are from an H100.
"""

import functools
import json
import lzma
from pathlib import Path

import jax
import pytest
from jax.profiler import ProfileData

from shardwright.inspect.compiled.trace import (
    devices_of,
    line_times,
    read_trace,
    step_bubble,
    top_lines,
)
from tests.inspect.compiled.hlo_texts import TEXT
from tests.support.step_text import table_of

STEP = "jit_training_step"
DATA = Path(__file__).parents[2] / "data/h100"
# jaxlib's reader of traces makes a type in a way that Python 3.13 warns of; as an error, that would
# end the process.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
SOURCE = {"train.py:10": "x = gather(x)", "train.py:20": "y = x @ w"}


def trace(planes):
    """A trace. planes: {plane: {line: [(start in µs, end in µs, name, stats), ...]}}."""
    text = ""
    for plane, lines in planes.items():
        events = [event for line in lines.values() for event in line]
        names = list(dict.fromkeys(name for *_, name, _ in events))
        keys = list(dict.fromkeys(key for *_, stats in events for key in stats))
        text += f'planes {{ name: "{plane}"\n'
        for table, entries in (("event_metadata", names), ("stat_metadata", keys)):
            for i, entry in enumerate(entries, 1):
                text += f'{table} {{ key: {i} value {{ id: {i} name: "{entry}" }} }}\n'
        for line, events in lines.items():
            text += f'lines {{ name: "{line}"\n'
            for start, end, name, stats in events:
                text += f"events {{ metadata_id: {names.index(name) + 1} "
                text += f"offset_ps: {round(start * 1e6)} duration_ps: {round((end - start) * 1e6)}"
                for key, value in stats.items():
                    kind = "str_value" if isinstance(value, str) else "int64_value"
                    number = keys.index(key) + 1
                    text += f" stats {{ metadata_id: {number} {kind}: {json.dumps(value)} }}"
                text += " }\n"
            text += "}\n"
        text += "}\n"
    space = ProfileData.text_proto_to_serialized_xspace(text)
    return ProfileData.from_serialized_xspace(space)


# ---- between the steps ---------------------------------------------------------------------------


def bubble(planes, steps):
    return step_bubble(devices_of(trace(planes), STEP, steps), steps)


@pytest.mark.parametrize("device", ["/device:TPU:0", "/device:GPU:0"])
def test_a_line_of_modules(device):
    """Steps at 0 … 90, 100 … 195 and 200 … 290: 15 of 200 µs.

    Streams beside it say the same, coarser; not read.
    """
    runs = [
        (0, 90, f"{STEP}(42)", {}),
        (100, 195, f"{STEP}(42)", {}),
        (200, 290, f"{STEP}(42)", {}),
    ]
    others = [(91, 99, "jit_evaluation_step(7)", {}), (300, 310, f"{STEP}(42)", {})]
    lines = {
        "XLA Modules": runs + others,
        "XLA Ops": [(5, 20, "fusion.1", {})],
        "Steps": [(0, 100, "0", {})],
    }
    idle = {"/device:TPU:1": {"XLA Modules": [(0, 5, "jit_init_state(1)", {})]}}
    found = bubble({device: lines, "/host:CPU": {}} | idle, 3)
    assert found["step_bubble"] == pytest.approx(15 / 200)
    assert found["devices"] == 1


@pytest.mark.parametrize(
    ("planes", "steps", "why"),
    [
        ({}, 2, "the trace has no execution of the step"),
        (
            {"/device:TPU:0": {"XLA Modules": [(0, 9, STEP, {})]}},
            2,
            "the trace shows 1 of 2 steps of /device:TPU:0",
        ),
    ],
)
def test_what_cannot_be_measured_is_not(planes, steps, why):
    with pytest.raises(ValueError, match=why):
        bubble(planes, steps)


# ---- by source line ------------------------------------------------------------------------------


def times(planes, text=TEXT):
    table = table_of(text)
    table.source.update(SOURCE)
    return line_times(devices_of(trace(planes), "jit_f", 2), table)


def by_line(found):
    return {row["line"]: [round(row[key], 6) for key in ("seconds", "share", "collective", "exposed")]
            for row in found["lines"]}  # fmt: skip


def on_cpu(device, *events):
    of = {"hlo_module": "jit_f", "run_id": 7, "device_ordinal": device}
    return [(start, end, name, of | {"hlo_op": name}) for start, end, name in events]


def test_lines_of_cpu_devices():
    """Device 0: a loop of 100 s around collectives of 30 and 20 s, of which a product beside them
    covers 10 s; the loop itself is no work. Device 1: 50 s of a program's operation without a
    line."""
    second = 1e6

    def at(start, end, name):
        return (start * second, end * second, name)

    threads = {
        "a": on_cpu(0, at(0, 100, "loop"), at(10, 40, "half"), at(50, 70, "again")),
        "b": on_cpu(0, at(60, 90, "product"), at(95, 100, "total"))
        + on_cpu(1, at(0, 50, "unknown")),
        "python": [
            (0, 9e6, "$f.py:1 f", {"hlo_module": "jit_f", "hlo_op": "half", "device_ordinal": 0})
        ],
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


def test_a_line_of_operations():
    """As TPUs have it: an operation is named by its whole instruction.

    Those outside of the program are others.
    """
    lines = {
        "XLA Modules": [(0, 100, "jit_f(12)", {}), (100, 200, "jit_g(13)", {})],
        "XLA Ops": [(10, 30, "%product = f32[8,16] fusion(%a)", {}), (110, 190, "product", {})],
    }
    found = times({"/device:TPU:0": lines})
    assert by_line(found) == {"train.py:20": [20e-6, 1, 0, 0]}


def test_the_larger_of_two_matmuls_takes_longer(tmp_path):
    """A product of ten times the FLOPs, on a line of its own."""

    @jax.jit
    def traced(x, small, large):
        y = x @ small
        return y @ large

    key = jax.random.key(0)
    x, small, large = (
        jax.random.normal(key, shape) for shape in ((512, 512), (512, 512), (512, 5120))
    )
    compiled = traced.lower(x, small, large).compile()
    jax.block_until_ready(compiled(x, small, large))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(tmp_path, profiler_options=options)
    for _ in range(6):  # a run traces a part of the step after those that it reads
        jax.block_until_ready(compiled(x, small, large))
    jax.profiler.stop_trace()
    (path,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    text = tmp_path / "step.txt"
    text.write_text(compiled.as_text())
    of_all = read_trace(path, "jit_traced", 6, text)["lines"]
    found = read_trace(path, "jit_traced", 5, text)["lines"]
    assert found["seconds"] < 0.99 * of_all["seconds"]
    first = traced.__wrapped__.__code__.co_firstlineno + 2
    share = {
        int(row["line"].rpartition(":")[2]): row["share"]
        for row in found["lines"]
        if ":" in row["line"]
    }
    assert share[first + 1] > 3 * share[first]
    assert sum(row["share"] for row in found["lines"]) == pytest.approx(1)
    assert next(row["text"] for row in found["lines"]) == "return y @ large"
    assert json.loads(path.with_name("profile_by_line.json").read_text()) == found
    assert found["steps"] == 5


def test_without_the_text_the_rest_is_read(tmp_path):
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(b"")
    found = read_trace(path, "jit_f", 2, None)
    assert found["lines"] == {"because": "there is no HLO text of the step"}
    assert "because" in found["bubble"]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


# ---- traces of a real H100 -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_h100(tmp_path_factory):
    """Reads a trace of four steps of first_chip on an H100: with CUDA graphs, as runs are, and
    without.
    """

    @functools.cache
    def read(name):
        tmp_path = tmp_path_factory.mktemp(name)
        for kept, path in (
            (f"{name}.xplane.xz", tmp_path / "x.xplane.pb"),
            ("step.hlo.xz", tmp_path / "step.txt"),
        ):
            path.write_bytes(lzma.decompress((DATA / kept).read_bytes()))
        found = read_trace(tmp_path / "x.xplane.pb", STEP, 4, tmp_path / "step.txt")
        profile = jax.profiler.ProfileData.from_file(str(tmp_path / "x.xplane.pb"))
        plane = next(plane for plane in profile.planes if plane.name == "/device:GPU:0")
        events = [event for line in plane.lines if "Compute" in line.name for event in line.events]
        return found, [(event.name, event.duration_ns) for event in events]

    return read


@pytest.mark.parametrize(("name", "step_ms"), [("graphs", 57.3), ("no_graphs", 60.1)])
def test_the_steps_of_an_h100(of_h100, name, step_ms):
    """The runs logged 57.3 and 60.1 ms between the starts of these steps."""
    bubble = of_h100(name)[0]["bubble"]
    assert (bubble["steps"], bubble["devices"]) == (4, 1)
    assert 1e3 * bubble["step_seconds"] == pytest.approx(step_ms, abs=0.1)
    assert bubble["step_bubble"] < 1e-3


def test_the_lines_of_an_h100(of_h100):
    found, kernels = of_h100("no_graphs")
    share = {row["line"]: row["share"] for row in found["lines"]["lines"]}
    total = sum(duration for _, duration in kernels)
    # What cuDNN launches for attention, and the memsets before it.
    attention = (
        sum(duration for name, duration in kernels if "cudnn" in name or name.startswith("Memset"))
        / total
    )
    of_file = sum(part for line, part in share.items() if "attention.py" in line)
    assert attention > 0.2
    assert of_file == pytest.approx(attention, abs=0.01)
    assert share.get("without a line", 0) < 0.03


def test_the_lines_of_cuda_graphs_are_said_to_be_unknown(of_h100):
    found, _ = of_h100("graphs")
    assert found["lines"]["lines"][0]["line"] == "in CUDA graphs"
    assert found["lines"]["lines"][0]["share"] > 0.99
    assert "xla_gpu_enable_command_buffer=" in top_lines(found["lines"])
    assert all(len(line) <= 80 for line in top_lines(found["lines"]).splitlines())
