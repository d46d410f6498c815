"""What bench/throughput compares trains one model: the same losses, step by step, as ours; its arithmetic."""

import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench.throughput.figures import figures, flops_per_token, line_of, parts_of, ratios
from bench.throughput.jobs import MODULES, NEEDS, SEQAX_NEEDS, SIZES, check_seqax, jobs_of, variant_of
from bench.throughput.peers.job import Job, Shapes, batches
from bench.throughput.processes import environment, python_of
from bench.throughput.rounds import Measured, Timing, compare
from shardwright.run.flops import flops_of_model

ROOT = Path(__file__).parents[2]
SHAPES = Shapes(
    vocab=64, d_model=32, layers=3, n_kv=2, n_q_per_kv=2, d_head=16, d_ff=48, rope_base=100.0, norm_epsilon=1e-3
)
JOB = Job("", SHAPES, sequences=8, length=16, learning_rate=1e-2, clip_norm=0.5, epsilon=1e-4)
STEPS = 6
TOLERANCE = {"f32": 1e-5, "bf16": 1e-2}
"""Of losses between 4 and 5 nats, relative."""


def need(contestant: str) -> None:
    for module in NEEDS[contestant][0]:
        pytest.importorskip(module, reason=f"the contestant {contestant} needs {module}")


def random_weights(shapes: Shapes) -> dict[str, np.ndarray]:
    """The same weights for all contestants; norms differ from 1."""
    rng = np.random.default_rng(0)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape).astype(np.float32)
        return 1 + 0.1 * noise if "norm" in name else noise / np.float32(np.sqrt(shapes.d_model))

    return {name: draw(name, shape) for name, shape in shapes.weights().items()}


def losses(contestant: str, job: Job = JOB, **options) -> list[float]:
    module = importlib.import_module(f"bench.throughput.peers.{MODULES[contestant]}")
    trainer = module.Contestant(job, random_weights(job.shapes), **options)
    return trainer.wait([trainer.step() for _ in range(STEPS)])


@pytest.fixture(scope="module")
def ours():
    return {dtype: losses("ours", dataclasses.replace(JOB, dtype=dtype)) for dtype in TOLERANCE}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("contestant", ["cookbook", "torch"])
def test_peers_train_the_same_model(contestant, dtype, ours):
    need(contestant)
    options = {"compiled": False} if contestant == "torch" else {}
    found = losses(contestant, dataclasses.replace(JOB, dtype=dtype), **options)
    np.testing.assert_allclose(found, ours[dtype], rtol=TOLERANCE[dtype])
    assert found[STEPS - 2] < found[0] - 0.5  # the same batch, some updates later


@pytest.mark.slow
def test_seqax_trains_the_same_model(tmp_path):
    checkout = os.environ.get("SEQAX")
    if checkout is None:
        pytest.skip("SEQAX does not name a checkout of seqax with its environment (docs/performance.md)")
    job = dataclasses.replace(JOB, contestant="seqax_trainer", dtype="bf16", d=4, t=2, checkout=checkout)
    job = dataclasses.replace(job, shapes=dataclasses.replace(SHAPES, norm_epsilon=1e-6), clip_norm=1.0)
    np.savez(tmp_path / "weights.npz", **random_weights(job.shapes))
    program = f"""
import numpy
from bench.throughput.peers.job import Job
from bench.throughput.peers.seqax_trainer import Contestant
trainer = Contestant(Job.from_json({job.to_json()!r}), dict(numpy.load({str(tmp_path / "weights.npz")!r})))
print(trainer.wait([trainer.step() for _ in range({STEPS})]))
"""
    env = environment(job, tmp_path)
    done = subprocess.run([python_of(job), "-c", program], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    expected = losses("ours", dataclasses.replace(job, checkout=""))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE["bf16"])


def test_seqax_needs_a_checkout_and_its_environment(tmp_path):
    with pytest.raises(ValueError, match=r"no train\.py\. Give a checkout: git clone"):
        check_seqax(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(ValueError, match=r"-m venv .*/.venv && .* install -r bench/throughput/seqax.txt"):
        check_seqax(tmp_path)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    check_seqax(tmp_path)
    job = jobs_of("demo", ["ours", "seqax", "floor"], "f32", "cpu", [], tmp_path)["seqax"]
    assert python_of(job) == str(python)
    assert (ROOT / SEQAX_NEEDS).exists()
    assert "seqax" not in jobs_of("demo", ["ours", "floor"], "f32", "cpu", [])


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 1.01e-2},
        {"b1": 0.89},
        {"b2": 0.94},
        {"epsilon": 2e-4},
        {"weight_decay": 0.0},
        {"clip_norm": 0.6},
        {"seed": 1},
        {"shapes": dataclasses.replace(SHAPES, rope_base=110.0)},
        {"shapes": dataclasses.replace(SHAPES, norm_epsilon=2e-3)},
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_peer_that_trains_otherwise_is_seen(change, ours):
    found = losses("cookbook", dataclasses.replace(JOB, **change))
    assert not np.allclose(found, ours["f32"], rtol=3 * TOLERANCE["f32"], atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("contestant", ["ours", "cookbook"])
def test_eight_devices_train_as_one(contestant, ours):
    found = losses(contestant, dataclasses.replace(JOB, d=4, t=2))
    np.testing.assert_allclose(found, ours["f32"], rtol=TOLERANCE["f32"])


@pytest.mark.long
def test_torch_takes_the_fastest_kernel_that_can():
    need("torch")
    from torch.nn.attention import SDPBackend

    from bench.throughput.peers.torch_trainer import allow, fastest_kernel

    can = SDPBackend.MATH
    assert fastest_kernel(JOB, [can], "cpu") is can
    assert fastest_kernel(JOB, [], "cpu") is None
    allow([])  # what a kernel does that cannot do these shapes
    try:
        assert fastest_kernel(JOB, [SDPBackend.CUDNN_ATTENTION, can], "cpu") is can
    finally:
        allow(SDPBackend.__members__.values())


def test_settings_reach_our_configuration():
    from bench.throughput.peers.ours import config_of

    settings = ("training.save=dots", "training.loss_chunk=8")
    c = config_of(dataclasses.replace(JOB, settings=settings, platform="gpu", microbatches=2, dtype="bf16"))
    assert (c.training.save, c.training.loss_chunk, c.training.microbatches) == ("dots", 8, 2)
    assert c.training.compute_dtype == "bf16"
    assert c.hardware.name == "NVIDIA H200"
    assert (c.model.rope_base, c.optimizer.clip_norm, c.optimizer.schedule) == (100.0, 0.5, "constant")


def test_jobs_travel_as_json():
    job = dataclasses.replace(JOB, settings=("a=1",), d=2)
    assert Job.from_json(job.to_json()) == job


def test_batches_are_the_same_each_time():
    first, again = list(batches(JOB)), list(batches(JOB))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[0], first[1])


# ---- arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["2m", "124m", "1b"])
def test_flops_are_those_that_training_prints(size):
    import train
    from bench.throughput.peers.ours import config_of

    s = SIZES[size]
    job = Job("ours", s.shapes, s.sequences, s.length)
    c = config_of(job)
    expected = flops_of_model(train.weight_table(c.model), c.model, s.length)
    assert flops_per_token(job) == (expected.causal, expected.full)


def test_sizes_are_those_of_configs():
    from bench.throughput.peers.ours import config_of

    for size in ("270m", "540m", "1b", "2b"):
        s = SIZES[size]
        job = Job("ours", s.shapes, s.sequences, s.length, settings=(f"model={size}",))
        plain = dataclasses.asdict(config_of(job).model)
        assert {name: plain[name] for name in dataclasses.asdict(s.shapes)} == dataclasses.asdict(s.shapes)
    assert SIZES["124m"].shapes.matmul_parameters == pytest.approx(124e6, rel=0.01)


@pytest.mark.parametrize("t", [1, 2])
def test_the_floor_multiplies_what_a_step_multiplies(t):
    from bench.throughput.peers.floor import attention_share

    products = SHAPES.products(t)
    assert sum(inputs * outputs * n for inputs, outputs, n in products) * t == SHAPES.matmul_parameters
    causal, _ = flops_per_token(JOB)
    norms = sum(math.prod(shape) for name, shape in SHAPES.weights().items() if "norm" in name)
    assert 6 * SHAPES.matmul_parameters * (1 + attention_share(JOB)) == pytest.approx(causal - 6 * norms)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1), pytest.param((4, 2), marks=pytest.mark.slow)])
def test_the_floor_runs_all_of_its_products(mesh):
    from bench.throughput.peers.floor import Contestant

    floor = Contestant(dataclasses.replace(JOB, d=mesh[0], t=mesh[1]))
    floor.wait([floor.step(), floor.step()])
    for (x, w, dy), (y, dx, dw) in zip(floor.given, floor.results, strict=True):
        np.testing.assert_allclose(y[-1], np.asarray(x[-1]) @ np.asarray(w[-1]), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(dx[-1], np.asarray(dy[-1]) @ np.asarray(w[-1]).T, rtol=1e-3, atol=1e-4)
        rows = lambda block: np.asarray(block).reshape(-1, block.shape[-1])
        np.testing.assert_allclose(dw[-1], rows(x[-1]).T @ rows(dy[-1]), rtol=1e-3, atol=1e-4)
    # None was moved out of a loop, or computed once for several: what the compiler counts is all of them.
    counted = floor.jitted.lower(floor.given, floor.results).compile().cost_analysis()["flops"]
    assert counted * mesh[0] * mesh[1] == pytest.approx(6 * SHAPES.matmul_parameters * JOB.tokens, rel=0.01)


def row(label: str, tokens_per_s: float, peak: int = 100, **more) -> dict:
    found = {"label": label, "contestant": MODULES[label], "error": None, "peak_bytes": peak}
    return found | {"tokens_per_s": tokens_per_s, "tokens_per_s_median": tokens_per_s, **more}


def test_a_variant_of_ours():
    job = variant_of(JOB, "training.save=dots,sequences=4,microbatches=2,training.unroll=2")
    assert (job.sequences, job.microbatches, job.settings) == (4, 2, ("training.save=dots", "training.unroll=2"))
    jobs = jobs_of("1b", ["ours", "torch", "floor"], "bf16", "gpu", ["sequences=4"])
    assert list(jobs) == ["floor", "ours", "torch", "ours sequences=4"]
    assert list(jobs_of("1b", ["torch", "floor"], "bf16", "gpu", ["sequences=4"])) == ["floor", "torch"]


def test_the_ratios():
    rows = {x["label"]: x for x in (row("floor", 1), row("ours", 110), row("torch", 100))}
    rows["ours a=1"] = row("ours", 121) | {"label": "ours a=1"}
    lines = ratios("1b", rows).splitlines()
    assert lines == [
        "ratio   1b, ours / torch: 1.10, by medians 1.10",
        "ratio   1b, ours a=1 / ours: 1.10, by medians 1.10",
    ]


def test_shares_and_lines():
    floor = Measured("floor", dataclasses.replace(JOB, contestant="floor"), rounds=[0.5, 0.6])
    floor.about = {"peak": 1e9, "attention_share": 0.1}
    ours = Measured("ours", dataclasses.replace(JOB, contestant="ours"), rounds=[2.0, 1.0, 6.0], host_peak=2**30)
    floor = figures(floor, None)
    found = figures(ours, floor)
    assert found["tokens_per_s"] == 128
    assert found["tokens_per_s_median"] == 64
    assert found["of_floor"] == pytest.approx(0.55)
    assert found["mfu_full"] == pytest.approx(128 * flops_per_token(JOB)[1] / 1e9)
    assert "1,024" in line_of(found)
    floor["about"]["peak"] = 1.0  # measured at a bad moment
    assert figures(ours, floor)["mfu_causal"] == pytest.approx(0.55)
    ours.error = "no ready within 3 s"
    assert line_of(figures(ours, floor)).endswith("failed: no ready within 3 s")


def test_the_table_of_the_parts_of_a_step():
    ours = Measured("ours", dataclasses.replace(JOB, contestant="ours"), rounds=[0.02, 0.01])
    ours.parts = {"event": "parts", "took": {"matmul": 7.0, "other": 2.0}}
    ours.parts["least"] = {"matmul": 5.0, "attention": 0.0, "other": 1.5}
    rows = {"ours": figures(ours, None)}
    for label, parts in {"alone": {**ours.parts, "least": None}, "untraced": {"because": "it is empty."}}.items():
        ours.parts = parts
        rows[label] = figures(ours, None)
    assert parts_of("124m", rows | {"torch": row("torch", 1)}) == [
        "| 124m, ours | 5.0 | 7.0 | 0.0 | 0.0 | 1.5 | 2.0 |  | 0.0 | 6.5 | 10.0 |",
        "| 124m, alone |  | 7.0 |  | 0.0 |  | 2.0 |  | 0.0 |  | 10.0 |",
        "| 124m, untraced | not measured, because it is empty. |",
    ]


def test_torch_in_its_slowest_mode_to_compile():
    jobs = jobs_of("1b", ["ours", "torch", "torch-max-autotune", "floor"], "bf16", "gpu", ["a=1"], parts=True)
    assert {label: job.parts for label, job in jobs.items() if label.startswith("ours")} == {
        "ours": True,
        "ours a=1": True,
    }
    assert jobs["torch-max-autotune"] == dataclasses.replace(jobs["torch"], settings=("max-autotune",))


# ---- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_contestant_that_fails_does_not_stop_the_others():
    jobs = {name: dataclasses.replace(JOB, contestant=name) for name in ("no_such_trainer", "floor")}
    for take_turns in (True, False):
        seen = []
        found = compare(jobs, Timing(1, 0.01, take_turns, 120), seen.append)
        assert "No module named 'bench.throughput.peers.no_such_trainer'" in found["no_such_trainer"].error
        assert found["floor"].error is None
        assert min(found["floor"].rounds) > 0
        assert [measured.label for measured in seen] == list(jobs)


def test_a_contestant_that_takes_too_long_is_ended():
    jobs = {"floor": dataclasses.replace(JOB, contestant="floor")}
    found = compare(jobs, Timing(1, 0.01, True, limit=0.2), print)
    assert "no imported within" in found["floor"].error


def test_nothing_starts_without_time_left():
    jobs = {"floor": dataclasses.replace(JOB, contestant="floor")}
    found = compare(jobs, Timing(1, 0.01, False, 120, until=time.monotonic() + 5), print)
    assert found["floor"].error == "not measured: no time was left"


@pytest.mark.slow
def test_the_program_and_its_continuation(tmp_path):
    command = [sys.executable, "-m", "bench.throughput", "--platform", "cpu", "--sizes", "tiny"]
    command += ["--rounds", "2", "--seconds", "0.1", "--json", str(tmp_path / "out.json")]
    run = lambda *more: subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=300)
    done = run("--only", "cookbook")
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "out.json").read_text())["tiny"]["contestants"]
    done = run(
        "--only", "ours,cookbook", "--parts", "--one-at-a-time", "--extra-settings", "training.save=nothing,sequences=4"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())["tiny"]["contestants"]
    assert list(found) == ["floor", "cookbook", "ours", "ours training.save=nothing,sequences=4"]
    assert found["cookbook"] == first["cookbook"]
    assert "ours / cookbook" in done.stdout
    took = found["ours"]["parts"]["took"]
    assert took["matmul"] > 0
    # Threads work side by side, and the trace slows them: of a step that is as fast, it is near its time.
    assert 0.1 < sum(took.values()) / 1000 / min(found["ours"]["step_s"]) < 10
    assert found["ours"]["losses"][0] != found["ours training.save=nothing,sequences=4"]["losses"][0]
    for label, row in found.items():
        assert row["error"] is None
        assert len(row["step_s"]) == 2
        assert row["peak_bytes"] > row["imports_bytes"] > 0
        assert ("mfu_full" in row) == (label != "floor")
