"""Whole steps with positions sharded over c: proved, and no token leaks. Their numbers: test_oracles.py."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import train
from shardwright.data.loader import TokenBatch
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling import attention_calls, attention_paths, context
from shardwright.modeling.model import load_model
from shardwright.run.config import Config
from shardwright.run.step import trace_step
from shardwright.tools.verify.meshes import ONE_DEVICE
from tests.support import tiny

WAYS = {  # training.context, training.attention
    "gather, blockwise": ("gather", "blockwise"),
    "ulysses, blockwise": ("ulysses", "blockwise"),
    "ring": ("ring", "auto"),
}


def config(way: str, **training) -> Config:
    """Two layers, of sizes that 6 divides; 4 kv heads, fewer than some meshes have devices of c and t."""
    how, path = WAYS[way]
    model = tiny.model(vocab=48, d_model=48, layers=2, n_kv=4, n_q_per_kv=6, d_ff=48)
    c = tiny.config(model, context=how, attention=path, microbatches=2, **training)
    c.training.seq_len = 48
    return c


def sizes_of(mesh: str) -> dict[str, int]:
    return ONE_DEVICE | {word[0]: int(word[2:]) for word in mesh.split()}


# ---- the proof ----------------------------------------------------------------------------------------------------


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("way", "mesh"), [("gather, blockwise", "d=2 c=2 t=2"), ("ring", "r=2 e=2 c=4"), ("ring", "p=2 c=2")]
)
def test_steps_are_proved(way, mesh):
    sizes = {axis: n for axis, n in sizes_of(mesh).items() if n > 1 or axis in "rdt"}
    on = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))
    c = config(way)
    assert find_unsound(trace_step(c, load_model(c.model), on)) == []


@pytest.mark.long
@pytest.mark.parametrize("path", ["cudnn", "splash"])
def test_a_step_by_ulysses_and_a_kernel_is_proved(monkeypatch, path):
    """The kernels, which take whole sequences, are not run; cuDNN's is replaced."""
    real = jax.nn.dot_product_attention

    def plain(*args, implementation, **options):
        return real(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    for module in (attention_calls, attention_paths, context):
        monkeypatch.setattr(module, "choose", lambda setting, *_, **__: setting)  # this device has no kernels
    c = tiny.config(tiny.model(layers=1, n_kv=4), context="ulysses", attention=path)
    c.training.seq_len = 128
    assert find_unsound(trace_step(c, load_model(c.model), tiny.mesh("d=2 c=2 t=2"))) == []


# ---- the leak probe -----------------------------------------------------------------------------------------------

STARTS = {0: (5, 12, 24, 37, 47), 1: (24,)}
"""Where documents start, of two sequences: within blocks of 6 and devices' parts, and on their borders."""


def batch(changed: tuple[int, int] | None = None) -> TokenBatch:
    """The same tokens in both rows of each pair; `changed` is a row and a target that has another token."""
    targets = np.random.default_rng(0).integers(1, 48, (8, 48)).astype(np.uint32)
    starts = np.zeros(targets.shape, bool)
    for row in range(8):
        starts[row, [0, *STARTS[row % 2]]] = True
    if changed:
        targets[changed] = (targets[changed] + 7) % 48
    return TokenBatch(targets, starts, np.ones(targets.shape, bool))


def expected_changes(row: int, target: int) -> np.ndarray:
    """A target is read at the next position: logits from there to the end of its document depend on it."""
    borders = [0, *STARTS[row % 2], 48]
    end = next(border for border in borders if border > target)
    seen = np.zeros((8, 48), bool)
    seen[row, target + 1 : end] = True
    return seen


@pytest.mark.long
@pytest.mark.parametrize(("way", "mesh"), [("ulysses, blockwise", "d=2 c=4"), ("ring", "c=3 t=2")])
def test_a_token_changes_the_later_logits_of_its_document_alone(way, mesh):
    c = config(way, attention_block=6)

    def per_device(w: train.Transformer, one: TokenBatch) -> train.act["B/b L/c V/t/p"]:
        return tiny.logits(w, one, c)

    with jax.set_mesh(tiny.mesh(mesh)):
        run, w = tiny.per_device(per_device), tiny.weights(c.model)

        def logits(*changed):
            return np.asarray(run(w, tiny.place(batch(*changed), TokenBatch)))

        plain = logits()
        for changed in ((0, 0), (0, 11), (2, 12), (4, 23), (0, 30), (0, 46), (1, 3), (1, 23), (1, 24), (3, 46)):
            differs = np.any(logits(changed) != plain, axis=-1)
            np.testing.assert_array_equal(differs, expected_changes(*changed), err_msg=str(changed))
