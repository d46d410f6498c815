"""The time between steps: from traces made by hand, whose shares are known, and from real ones of CPU devices.

Those of GPUs and TPUs have the form in which XLA's profiler writes them (its sources name these planes, lines and
stats), but none of them is from a real device.
"""

import json
import time

import jax
import jax.numpy as jnp
import pytest
from traces import trace

from shardwright.compiled.bubble import NotMeasured, step_bubble
from shardwright.run import profile
from shardwright.run.flops import ModelFlops, PeakFlops, Speed
from shardwright.run.metrics import RunLog
from shardwright.run.profile import StepProfiler

STEP = "jit_training_step"
# jaxlib's reader of traces makes a type in a way that Python 3.13 warns of; as an error, that would end the process.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
SPEED = Speed(100, ModelFlops(1, 1, "", ""), PeakFlops(1, ""))


def gpu(adam_ends, nccl_ends, steps=3):
    """Steps of 100 µs on two streams, and the beginning of one more; copies, and another program, beside them."""
    of = {"hlo_module": STEP, "hlo_op": "fusion"}
    compute, nccl = [], []
    for at in range(0, 100 * steps, 100):
        compute += [(at, at + 30, "gemm", of), (at + 30, at + 50, "softmax", of), (at + 50, at + 80, "gemm", of)]
        compute += [(at + 80, at + adam_ends, "adam", {"cuda_graph_id": 3})]  # of a CUDA graph
        nccl += [(at + 60, at + nccl_ends, "ncclDevKernel_AllGather", of)]
    compute += [(100 * steps, 100 * steps + 30, "gemm", of)]
    return {
        "Stream #13(Compute)": compute,
        "Stream #24(Compute)": nccl,
        "Stream #15(MemcpyH2D,Compute)": [
            (90, 99.5, "MemcpyH2D", {"memcpy_details": "size:1"}),
            (91, 99.7, "add", {"hlo_module": "jit_add"}),
        ],
    }


def test_gpu_streams():
    """GPU:0 executes nothing of the step in 98 … 100 and 198 … 200 of 200 µs, GPU:1 from 96 on: 2% and 4%.

    The last kernel is one stream's on GPU:0, the other's on GPU:1.
    """
    host = {"python": [(0, 400, "step", {})]}
    found = step_bubble(trace({"/host:CPU": host, "/device:GPU:0": gpu(98, 90), "/device:GPU:1": gpu(90, 96)}), STEP, 3)
    assert found["step_bubble"] == pytest.approx(0.03)
    assert found["gap_seconds"] == pytest.approx(3e-6)
    assert found["step_seconds"] == pytest.approx(100e-6)
    assert (found["steps"], found["devices"]) == (3, 2)


@pytest.mark.parametrize("device", ["/device:TPU:0", "/device:GPU:0"])
def test_a_line_of_modules(device):
    """Steps at 0 … 90, 100 … 195 and 200 … 290: 15 of 200 µs. Streams beside it say the same, coarser; not read."""
    runs = [(0, 90, f"{STEP}(42)", {}), (100, 195, f"{STEP}(42)", {}), (200, 290, f"{STEP}(42)", {})]
    others = [(91, 99, "jit_evaluation_step(7)", {}), (300, 310, f"{STEP}(42)", {})]
    lines = {"XLA Modules": runs + others, "XLA Ops": [(5, 20, "fusion.1", {})], "Steps": [(0, 100, "0", {})]}
    idle = {"/device:TPU:1": {"XLA Modules": [(0, 5, "jit_init_state(1)", {})]}}
    found = step_bubble(trace({device: lines, "/host:CPU": {}} | idle), STEP, 3)
    assert found["step_bubble"] == pytest.approx(15 / 200)
    assert found["devices"] == 1


def test_cpu_devices():
    """Operations are on any thread; CPU:1's second step begins before its first has ended, which is no gap."""
    op = lambda device, run: {"hlo_module": STEP, "hlo_op": "dot", "run_id": run, "device_ordinal": device}
    threads = {
        "tf_XLAEigen/1": [(80, 90, "dot", op(0, 9)), (0, 40, "dot", op(0, 7)), (0, 50, "dot", op(1, 7))],
        "tf_XLAPjRtCpuClient/2": [
            (30, 60, "dot", op(0, 7)),
            (50, 55, "dot", op(0, 7)),
            (45, 70, "dot", op(1, 9)),
            (60, 75, "$f.py:1 f", op(0, 7)),
        ],
        "python": [(61, 79, "dot", {"hlo_module": "jit_other", "run_id": 8, "device_ordinal": 0})],
    }
    found = step_bubble(trace({"/host:CPU": threads}), STEP, 2)
    assert found["step_bubble"] == pytest.approx(20 / 80 / 2)


@pytest.mark.parametrize(
    ("planes", "steps", "why"),
    [
        ({}, 2, f"the trace has no line of any device with executions of {STEP}"),
        ({"/host:CPU": {"python": [(0, 9, "f", {})]}}, 2, f"no line of any device with executions of {STEP}"),
        ({"/device:GPU:0": {"Stream #1": [(0, 9, "k", {})]}}, 2, "no line of the devices /device:GPU:0 with"),
        ({"/device:TPU:0": {"XLA Modules": [(0, 9, STEP, {})]}}, 2, f"1 of 2 executions of {STEP} on /device:TPU:0"),
        ({"/device:GPU:0": gpu(98, 90)}, 5, "do not show where each of the 5 steps begins"),
        (
            {"/device:GPU:0": {"Stream #1": [(i, i + 1, "k", {"hlo_module": STEP}) for i in range(12)]}},
            3,
            "where each of",
        ),
        ({"/device:GPU:0": gpu(98, 90)}, 1, "a run of one step has nothing between steps"),
    ],
)
def test_what_cannot_be_measured_is_not(planes, steps, why):
    with pytest.raises(NotMeasured, match=why):
        step_bubble(trace(planes), STEP, steps)


@jax.jit
def slow_step(x):
    for _ in range(8):
        x = jnp.tanh(x @ x) / 8
    return x


@pytest.fixture(autouse=True)
def _of_this_program(monkeypatch):
    monkeypatch.setattr(profile, "MODULE", "jit_slow_step")


def train(directory, sleep_s, sample_after=None):
    with RunLog(directory, total_steps=18, start_step=10, speed=SPEED) as log:
        profiler = StepProfiler(log, None)
        x = jax.block_until_ready(slow_step(jnp.ones((256, 256))))
        for i in range(8):
            profiler.before_step(i)
            x = slow_step(x)
            profiler.after_step(i, x)
            if i == sample_after:
                log.log_event(10 + i, "sample", {"text": "a"})
            if sleep_s:
                jax.block_until_ready(x)
                time.sleep(sleep_s)
    trace = profiler.close()
    return trace, [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_sleep_between_the_steps_of_a_real_run(tmp_path, capsys):
    _, (slept,) = train(tmp_path / "a", 0.2)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("idle "))
    _, (awake,) = train(tmp_path / "b", 0)
    assert (slept["event"], slept["step"], slept["steps"], slept["devices"]) == ("step_bubble", 15, 4, 1)
    assert 0.2 <= slept["gap_seconds"] < 0.6
    assert slept["gap_seconds"] < slept["step_seconds"]
    assert slept["step_bubble"] == pytest.approx(slept["gap_seconds"] / slept["step_seconds"])
    assert 0 <= awake["gap_seconds"] < 0.1
    gap, step = (1000 * slept[name] for name in ("gap_seconds", "step_seconds"))
    share = f"{100 * slept['step_bubble']:.2f}%"
    assert line == f"idle       {share} of the time: devices wait between steps, {gap:.2f} of {step:.1f} ms"


@pytest.mark.long
@pytest.mark.parametrize(("after", "among"), [(1, False), (2, True), (4, True), (5, False)])
def test_what_stops_the_training_among_the_steps_is_no_bubble(tmp_path, capsys, after, among):
    _, events = train(tmp_path, 0, sample_after=after)
    assert [event["event"] for event in events] == (["sample"] if among else ["sample", "step_bubble"])
    told = "idle       not measured, because the training stopped among these steps for: sample"
    assert (told in capsys.readouterr().out.splitlines()) == among


@pytest.mark.long
def test_a_trace_without_executions_is_told_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profile, "MODULE", "jit_another")
    trace, lines = train(tmp_path, 0)
    assert trace.is_file()
    assert lines == []
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("idle ")]
    why = "the trace has no line of any device with executions of jit_another"
    assert said == [f"idle       not measured, because {why}"]


@pytest.mark.parametrize("broken", [b"", b"no trace", None])
def test_a_broken_trace_is_told_in_one_line(tmp_path, capsys, monkeypatch, broken):
    end = profile._end_of_trace

    def end_and_break(*arguments):
        directory = end(*arguments)
        (path,) = directory.glob("*.xplane.pb")
        path.write_bytes(broken) if broken is not None else path.unlink()
        return directory

    monkeypatch.setattr(profile, "_end_of_trace", end_and_break)
    trace, lines = train(tmp_path, 0)
    assert trace.is_file()
    assert lines == []
    output = capsys.readouterr().out.splitlines()
    assert [line for line in output if line.startswith("idle       not measured, because ")] == output[-1:]
