"""What bench/throughput compares trains one model: the same losses, step by step, as ours; its
arithmetic.
"""

import dataclasses
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

import train
from bench.throughput.__main__ import MODULES, SIZES, line_of, main
from bench.throughput.peers.job import Job, Shapes
from bench.throughput.peers.ours import config_of
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


SAME = [
    ("torch", {"dtype": "f32"}),
    ("plain-jax", {"dtype": "bf16"}),
    ("plain-jax", {"d": 4, "t": 2}),
]


@pytest.mark.long
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
