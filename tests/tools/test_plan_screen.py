"""What a user sees of a plan: on the terminal, and as JSON.

The oracle is the sums of what was put in.
"""

import json
import re
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
TENSOR = "f32[2,4096]"


def plan(lines: int = 30, size: float = GIB) -> Plan:
    """Of a made-up step, in which each of so many lines keeps, multiplies and sends; later ones
    less.
    """
    held = [Held("", name, "weights", size / 2) for name in ("a", "b")]
    held += [
        Held(f"train.py:{100 + i}", f"bf16[{i}]", "saved", size / (i + 1), 1e12)
        for i in range(lines)
    ]
    ops = []
    for i in range(lines):
        line, n = f"a_directory/with_a_name/that_is_long.py:{i + 1}", 4096 // (i + 1)
        products = {
            "count": 8.0,
            "size": 2.0 * n**3,
            "traffic": 6.0 * n * n,
            "shape": (1, n, n, n),
            "dtype": "bf16",
        }
        for phase in ("forward", "backward"):
            ops.append(Operation("matmul", f"{n}×{n}×{n}", line, phase, **products, loop=1))
        ops.append(Operation("memory", f"bf16[{n}]", line, "forward", 8.0, traffic=2e6 * n, loop=1))
        sent = {
            "axes": ("r",) if i % 2 else ("d",),
            "bytes": 1e6 * n,
            "timing": "waited" if i % 2 else "ahead",
        }
        sent |= {"traffic": 2e6 * n, "tensor": TENSOR}
        ops.append(Operation("collective", "all_gather", line, "forward", 8.0, **sent))
    return plan_of(
        PlannedStep(ops, held, {"p": 1, "r": 8, "d": 8, "t": 1}, Facts(2**20, 4e10, "bf16", 8, 1)),
        H100,
        1000,
    )


H100 = chip_of("h100")


def tables(text: str) -> list[list[float]]:
    """The first number of each row of each table."""
    _, *blocks = text.split("\n\n")
    return [
        [float(line.split()[0].replace(",", "")) for line in block.splitlines()[2:]]
        for block in blocks
    ]


@pytest.mark.quick
@pytest.mark.parametrize(("size", "unit", "largest"), [(3.0, "B", "3.00"), (GIB, "GiB", "1.00")])
def test_figures_are_in_a_unit_that_fits_the_largest(size, unit, largest):
    head, first, *_ = as_text(plan(size=size), "ours").split("\n\n")[1].splitlines()[1:]
    assert (head.split()[0], first.split()[0]) == (unit, largest)


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
    fp8 = plan_of(made.step._replace(ops=ops), H100, 1)
    (op,) = (op for op in fp8.rows if op.kind == "matmul" and op.phase == "backward")
    (shown,) = (row[3] for row in work(fp8).rows if row[5] == "backward")
    assert shown == pytest.approx(100 * op.flops * op.count / op.exposed / H100.peak["fp8"])


@pytest.mark.quick
def test_the_screen_is_80_columns_wide():
    text = as_text(plan(), "ours", ["mesh.t=2: 3 % faster"])
    assert max(map(len, text.splitlines())) <= WIDTH == 80
    assert text.endswith("\nmesh.t=2: 3 % faster")
    assert text.startswith("ours on 64 × NVIDIA H100 SXM")
    assert re.search(r"all_gather +d near +ahead", text)
    assert re.search(r"all_gather +r far +waited", text)


@pytest.mark.quick
def test_the_answer_says_what_does_not_fit():
    sizes = 1 + sum(1 / (i + 1) for i in range(30))
    assert f"\nmemory  {sizes:.2f} GiB  of {H100.memory_bytes / GIB:.1f} GiB: fits\n" in as_text(
        plan(), "ours"
    )
    assert " of 990 TFLOP/s in bf16\n" in as_text(plan(), "ours")
    slow = plan()._replace(chip=chip_of("cpu"))
    assert " of 100 GFLOP/s in bf16\n" in as_text(slow, "ours")
    text, size = as_text(plan(size=40 * GIB), "ours"), 40 * sizes
    over = f"{size - H100.memory_bytes / GIB:.0f} GiB too much"
    assert over in text
    assert re.search(r"^most    40\.0 GiB  (weights|saved, train.py:100)$", text, re.M)


@pytest.mark.long
def test_a_plan_of_a_configuration_as_json(tmp_path):
    def run(name):
        return subprocess.run(
            [sys.executable, "-m", "tools.plan", "--config-name=c4_h100x64_7b", f"plan.output={tmp_path / name}"],
            cwd=ROOT, capture_output=True, text=True, timeout=300,
        )  # fmt: skip

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
