"""What bench/throughput compares trains one model: the same losses, step by step, as ours; its
arithmetic.
"""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

import train
from bench.throughput.__main__ import MODULES, SIZES, jobs_of, line_of, main
from bench.throughput.peers.floor import Contestant as Floor
from bench.throughput.peers.job import Job, Shapes, batches
from bench.throughput.peers.ours import config_of
from bench.throughput.processes import environment, python_of, run_rounds
from shardwright.program.flops import flops_of_model

ROOT = Path(__file__).parents[2]
SHAPES = Shapes(
    vocab=64,
    d_model=32,
    layers=3,
    n_kv=2,
    n_q_per_kv=2,
    d_head=16,
    d_ff=48,
    rope_base=100.0,
    norm_epsilon=1e-3,
)
JOB = Job("", SHAPES, sequences=8, length=16, learning_rate=1e-2, clip_norm=0.5, epsilon=1e-4)
STEPS = 6
TOLERANCE = {"f32": 1e-5, "bf16": 1e-2}
"""Of losses between 4 and 5 nats, relative."""


def random_weights(shapes: Shapes) -> dict[str, np.ndarray]:
    """The same weights for all contestants; norms differ from 1."""
    rng = np.random.default_rng(0)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape).astype(np.float32)
        return 1 + 0.1 * noise if "norm" in name else noise / np.float32(np.sqrt(shapes.d_model))

    return {name: draw(name, shape) for name, shape in shapes.weights().items()}


def losses(contestant: str, job: Job = JOB, **options) -> list[float]:
    module = importlib.import_module(
        f"bench.throughput.peers.{MODULES.get(contestant, contestant)}"
    )
    trainer = module.Contestant(job, random_weights(job.shapes), **options)
    return trainer.wait([trainer.step() for _ in range(STEPS)])


@pytest.fixture(scope="module")
def ours():
    return {dtype: losses("ours", dataclasses.replace(JOB, dtype=dtype)) for dtype in TOLERANCE}


SAME = [("torch", {"dtype": dtype}) for dtype in TOLERANCE] + [("plain-jax", {"dtype": "bf16"})]
OF_XLA = {"r": 2, "d": 2, "t": 2}
SAME += [("plain-jax", {"d": 4, "t": 2}), ("plain_jax", OF_XLA | {"save": "marked"})]
SAME += [("flax_nnx", OF_XLA | {"save": "everything"})]


@pytest.mark.slow
@pytest.mark.parametrize(("contestant", "changes"), SAME)
def test_peers_train_the_same_model(contestant, changes, ours):
    """On one device or a mesh, as ours on one device."""
    for package in {"torch": ("torch", "transformers"), "flax_nnx": ("flax",)}.get(contestant, ()):
        pytest.importorskip(package)
    options = {"compiled": False} if contestant == "torch" else {}
    found = losses(contestant, dataclasses.replace(JOB, **changes), **options)
    dtype = changes.get("dtype", "f32")
    np.testing.assert_allclose(found, ours[dtype], rtol=TOLERANCE[dtype])
    assert found[STEPS - 2] < found[0] - 0.5  # the same batch, some updates later


@pytest.mark.slow
def test_seqax_trains_the_same_model(tmp_path):
    checkout = os.environ.get("SEQAX")
    if checkout is None:
        pytest.skip(
            "SEQAX does not name a checkout of seqax with its environment (docs/performance.md)"
        )
    job = dataclasses.replace(
        JOB, contestant="seqax_trainer", dtype="bf16", d=4, t=2, checkout=checkout
    )
    job = dataclasses.replace(
        job, shapes=dataclasses.replace(SHAPES, norm_epsilon=1e-6), clip_norm=1.0
    )
    np.savez(tmp_path / "weights.npz", **random_weights(job.shapes))
    program = f"""
import numpy
from bench.throughput.peers.job import Job
from bench.throughput.peers.seqax_trainer import Contestant
trainer = Contestant(Job.from_json({job.to_json()!r}), dict(numpy.load({str(tmp_path / "weights.npz")!r})))
print(trainer.wait([trainer.step() for _ in range({STEPS})]))
"""
    env = environment(job, tmp_path)
    done = subprocess.run(
        [python_of(job), "-c", program], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    expected = losses("ours", dataclasses.replace(job, checkout=""))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE["bf16"])


def test_a_job_and_its_configuration():
    assert Job.from_json(JOB.to_json()) == JOB
    np.testing.assert_array_equal([*batches(JOB)], [*batches(JOB)])
    c = config_of(dataclasses.replace(JOB, platform="gpu", dtype="bf16"))
    assert (c.training.compute_dtype, c.model.rope_base, c.optimizer.clip_norm) == (
        "bf16",
        100.0,
        0.5,
    )
    assert list(jobs_of("1b", ["ours", "torch"], "bf16", "gpu")) == ["floor", "ours", "torch"]


# ---- arithmetic ----------------------------------------------------------------------------------


def check_flops(job: Job, of_products: float, rel: float):
    """The products of a token, those of causal attention, and the norms, are the FLOPs that a run
    counts.
    """
    c, s = config_of(job), job.shapes
    counted = flops_of_model(train.Llama(c.model).table, c.model, job.length / 2)
    norms = 6 * (2 * s.layers + 1) * s.d_model
    assert of_products * (1 + job.attention_share) + norms == pytest.approx(counted, rel=rel)


def test_sizes_and_flops_are_those_of_a_run():
    for size in ("270m", "1b", "2b"):
        of_run = yaml.safe_load((ROOT / f"configs/model/{size}.yaml").read_text())
        del of_run["defaults"]
        assert of_run.items() <= dataclasses.asdict(SIZES[size].shapes).items()
    check_flops(SIZES["270m"], 6 * SIZES["270m"].shapes.matmul_parameters, 1e-12)


@pytest.mark.slow
def test_the_floor_runs_all_of_the_products_of_a_step():
    job = dataclasses.replace(JOB, d=4, t=2)
    floor = Floor(job)
    floor.wait([floor.step(), floor.step()])
    for (x, w, dy), (y, dx, dw) in zip(floor.batches[0], floor.results, strict=True):
        np.testing.assert_allclose(
            y[-1], np.asarray(x[-1]) @ np.asarray(w[-1]), rtol=1e-3, atol=1e-4
        )
        np.testing.assert_allclose(
            dx[-1], np.asarray(dy[-1]) @ np.asarray(w[-1]).T, rtol=1e-3, atol=1e-4
        )

        def rows(block):
            return np.asarray(block).reshape(-1, block.shape[-1])

        np.testing.assert_allclose(dw[-1], rows(x[-1]).T @ rows(dy[-1]), rtol=1e-3, atol=1e-4)
    # None was moved out of a loop, or computed once for several: what the compiler counts is all of
    # them.
    counted = (
        floor.jitted.lower(floor.batches[0], floor.results).compile().cost_analysis()["flops"]
        * job.devices
    )
    assert counted == pytest.approx(6 * SHAPES.matmul_parameters * JOB.tokens, rel=0.01)
    check_flops(JOB, counted / JOB.tokens, 0.01)


def test_shares_and_ratios():
    def measured(name, step_s):
        return SimpleNamespace(
            name=name, job=JOB, ready={"compile_s": 1.0}, step_s=step_s, peak=2**30, error=None
        )

    floor = measured("floor", [0.5, 0.6])
    ours = measured("ours", [2.0, 1.0, 6.0])
    of_floor = f"{0.5 * (1 + 3 * 4 * 16 * 16 / SHAPES.matmul_parameters):.1%}"
    assert line_of(ours, floor, ours).split() == ["ours", "128", "64", of_floor, "1,024", "1.0"]
    assert line_of(measured("torch", [1.1]), floor, ours).split()[-3:] == ["1,024", "1.0", "1.10"]
    ours.error = "ended with 1"
    assert line_of(ours, floor, ours).endswith("failed: ended with 1")


# ---- processes -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_contestant_that_fails_does_not_stop_the_others():
    jobs = {
        name: dataclasses.replace(JOB, contestant=name) for name in ("no_such_trainer", "floor")
    }
    seen = {measured.name: measured for measured in run_rounds(jobs, 2, 0.01, True)}
    assert (
        "No module named 'bench.throughput.peers.no_such_trainer'" in seen["no_such_trainer"].error
    )
    assert (seen["floor"].error, len(seen["floor"].step_s)) == (None, 2)


@pytest.mark.slow
def test_the_program():
    command = [
        sys.executable,
        "-m",
        "bench.throughput",
        "--sizes",
        "tiny",
        "--only",
        "ours,plain-jax",
    ]
    command += ["--rounds", "2", "--seconds", "0.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    sizes = {"floor": 5, "ours": 6, "plain-jax": 7}
    assert {row[0]: len(row) for row in rows if row and row[0] in sizes} == sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds is 0; give at least 1"),
        (["--platform", "gpu", "--sizes", "demo"], "demo is for a CPU"),
        (["--platform", "gpu", "--only", "ours,seqax"], "seqax is for a CPU"),
        (["--sizes", "3m"], "there is no 3m"),
    ],
)
def test_what_a_user_can_get_wrong(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.throughput", *options])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err
