"""What a user sees of a plan: on the terminal, and as JSON.

The oracle is the sums of what was put in.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cluster.chips import chip_of
from shardwright.inspect.operation import Operation
from shardwright.inspect.plan.plan import Plan, plan_of
from shardwright.inspect.plan.step import Facts, Held, PlannedStep
from shardwright.inspect.tables import WIDTH
from shardwright.tools.plan.screen import GIB, SHOWN, as_text, work

ROOT = Path(__file__).parents[2]
CHIP = dataclasses.replace(
    chip_of("h100"),
    title="a chip",
    peak={"bf16": 1e15, "fp8": 2e15},
    memory_bytes=64 * GIB,
    memory_bandwidth=4e12,
    near_bandwidth=4e11,
    far_bandwidth=5e10,
    matmul_share=0.8,
    memory_share=0.8,
    link_share=0.8,
    interference=0.5,
    launch_s=2e-6,
    near_latency_s=1e-5,
    far_latency_s=4e-6,
    passing_latency_s=2e-6,
    error=0.25,
)


def plan(lines: int = 30, size: float = GIB) -> Plan:
    """Of a made-up step, in which each of so many lines keeps, multiplies and sends; later ones
    less.
    """
    held = [Held("", name, "weights", size / 2) for name in ("a", "b")]
    ops = []
    for i in range(lines):
        held.append(Held(f"model.py:{100 + i}", f"bf16[{i}]", "saved", size / (i + 1), 1e12))
        line, n = f"a_directory/with_a_name/that_is_long.py:{i + 1}", 4096 // (i + 1)
        product = {"count": 8.0, "size": 2.0 * n**3, "traffic": 6.0 * n * n, "dtype": "bf16"}
        for phase in ("forward", "backward"):
            made = Operation("matmul", f"{n}×{n}×{n}", line, phase, **product, loop=1)
            ops.append(made._replace(shape=(1, n, n, n)))
        ops.append(Operation("memory", f"bf16[{n}]", line, "forward", 8.0, traffic=2e6 * n, loop=1))
        axes, timing = (("d",), "ahead") if i % 2 == 0 else (("r",), "waited")
        sent = {"axes": axes, "timing": timing, "bytes": 1e6 * n, "traffic": 2e6 * n}
        sent["tensor"] = "f32[2,4096]"
        ops.append(Operation("collective", "all_gather", line, "forward", 8.0, **sent))
    facts = Facts(2**20, 4e10, "bf16", 8, 1)
    return plan_of(PlannedStep(ops, held, {"p": 1, "r": 8, "d": 8, "t": 1}, facts), CHIP, 1000)


def tables(text: str) -> list[list[float]]:
    """The first number of each row of each table."""
    _, *blocks = text.split("\n\n")
    return [
        [float(line.split()[0].replace(",", "")) for line in block.splitlines()[2:]]
        for block in blocks
    ]


SCREEN = """\
ours on 64 × a chip: r=8 d=8 t=1
step    495 ms    between 396 ms and 619 ms; 385 ms at the chip's peaks
time    93 %      waiting for messages, 6 % memory traffic, 1 % matmuls
speed   2.12M     tokens/s, of all devices
MFU     132.3 %   of 1000 TFLOP/s in bf16
memory  2.50 GiB  of 64.0 GiB: fits
most    1.00 GiB  weights
run     0:08:15   for 1,000 steps of 1.05M tokens
cost    $26       $3 an hour and device

Memory of a device at the peak: 2.50 GiB
 GiB     %  kind     again ms  line
1.00  40.0  weights                          2 arrays
1.00  40.0  saved        1.67  model.py:100
0.50  20.0  saved        1.67  model.py:101

Communication: 461 ms in a step, 461 ms of it waited for
 ms  waits ms   GiB  what        link    timing  line               tensor
359       359  15.3  all_gather  r far   waited  that_is_long.py:2  f32[2,4096]
102       102  30.5  all_gather  d near  ahead   that_is_long.py:1  f32[2,4096]

Work: 34.9 ms in a step, 0 µs of it computed again
  ms     %  TFLOP  peak %  bound    phase     line
22.3  4.50   1.10     4.9  memory   forward   that_is_long.py:1
10.5  2.13   0.14     1.3  memory   forward   that_is_long.py:2
 1.8  0.36   1.10    61.9  compute  backward  that_is_long.py:1
 0.3  0.06   0.14    48.4  compute  backward  that_is_long.py:2
mesh.t=2: 3 % faster"""


@pytest.mark.quick
def test_the_screen():
    assert as_text(plan(2), "ours", ["mesh.t=2: 3 % faster"]) == SCREEN
    text = as_text(plan(size=40 * GIB), "ours")
    assert max(map(len, text.splitlines())) <= WIDTH == 80
    size = 40 * (1 + sum(1 / (i + 1) for i in range(30)))
    assert f"\nmemory  {size:.0f} GiB   of 64.0 GiB: {size - 64:.0f} GiB too much\n" in text
    small = as_text(plan(size=3.0)._replace(chip=chip_of("cpu")), "ours")
    assert " of 100 GFLOP/s in bf16\n" in small
    head, first, *_ = small.split("\n\n")[1].splitlines()[1:]
    assert (head.split()[0], first.split()[0]) == ("B", "3.00")


@pytest.mark.quick
@pytest.mark.parametrize("lines", [3, 30])
def test_the_rows_add_up_to_the_totals(lines):
    made = plan(lines)
    sizes, sent, done = tables(as_text(made, "ours"))
    assert len(done) == min(2 * lines, SHOWN + 1)
    sums = {
        kind: 1e3 * sum(r.seconds for r in made.rows if (r.kind == "collective") == kind)
        for kind in (0, 1)
    }
    for shown, total in (
        (sizes, sum(x.bytes for x in made.step.held) / GIB),
        (sent, sums[1]),
        (done, sums[0]),
    ):
        assert shown[:SHOWN] == sorted(shown[:SHOWN], reverse=True)
        assert sum(shown) == pytest.approx(total, rel=0.02)


@pytest.mark.quick
def test_a_product_of_fp8_is_compared_with_the_peak_of_fp8():
    made = plan(1)
    ops = [op._replace(dtype="fp8") if op.kind == "matmul" else op for op in made.step.ops]
    fp8 = plan_of(made.step._replace(ops=ops), CHIP, 1)
    (op,) = (op for op in fp8.rows if op.kind == "matmul" and op.phase == "backward")
    (shown,) = (row[3] for row in work(fp8).rows if row[5] == "backward")
    assert shown == pytest.approx(100 * op.flops * op.count / op.exposed / CHIP.peak["fp8"])


@pytest.mark.long
def test_a_plan_of_a_configuration_as_json(tmp_path):
    def run(name):
        command = [sys.executable, "-m", "tools.plan", "--config-name=c4_h100x64_7b"]
        command.append(f"plan.output={tmp_path / name}")
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    done = run("plan.json")
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["peak_bytes"] == pytest.approx(sum(array["bytes"] for array in data["memory"]))
    assert data["seconds"] == pytest.approx(sum(row["exposed"] for row in data["work"]), rel=0.01)
    # Model FLOPs without attention: 6 of each weight and token, embed apart, over 64 devices.
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    products = sum(row["count"] * row["flops"] for row in data["work"] if row["kind"] == "matmul")
    assert products == pytest.approx(6 * (32 * layer + 4096 * 32768) * 512 * 4096 / 64, rel=0.01)
    refused = run("plan.txt")
    assert refused.returncode
    assert refused.stderr.strip().splitlines()[-1].endswith("must end in .json.")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
