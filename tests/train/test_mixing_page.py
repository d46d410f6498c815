"""docs/mixing.md: its layers are proved, causal, and right by numbers."""

import contextlib
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import shardops
from shardlib.shardtypes import f32, i32
from shardwright.inspect.causality import find_leaks, small_program
from shardwright.inspect.soundness import examine
from tests.support import tiny
from tests.support.own_model import imported
from tests.support.recipes import ROOT

PAGE = (ROOT / "docs/mixing.md").read_text()
MIXING = "\n\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
SELECTING = MIXING.replace('"mixing"', '"selecting"') + "\n\nModel = Selecting\n"
SIZES = {"vocab": 64, "d_model": 32, "n_kv": 8, "n_q_per_kv": 1, "d_head": 4, "d_ff": 8}


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory):
    at = tmp_path_factory.mktemp("mixing")
    with contextlib.ExitStack() as stack:
        for name, source in (("mixing", MIXING), ("selecting", SELECTING)):
            stack.enter_context(imported(name, source, at))
        yield


@pytest.mark.long
def test_selecting_layers_are_proved_and_causal():
    """The other ones, also sampled: tests/models/test_hybrid_page.py."""
    with jax.set_mesh(tiny.mesh("c=2 d=2 t=2")):
        model = sys.modules["selecting"].ModelConfig(**SIZES, layers=2, module="selecting")
        step = tiny.step(tiny.config(model, microbatches=2))
        found, undecided, *_ = examine(step, ("training",))
        assert (found, undecided) == ([], [])
        assert find_leaks(small_program(step, "evaluation")) == []


def looped(q, k, v, beta, g, document):
    """The gated delta rule, position by position, in float64."""
    out = np.zeros(v.shape)
    for row, head in np.ndindex(len(q), q.shape[2]):
        memory = np.zeros((q.shape[-1], v.shape[-1]))
        for i in range(q.shape[1]):
            is_first = i == 0 or document[row, i] != document[row, i - 1]
            memory = 0 * memory if is_first else np.exp(g[row, i, head]) * memory
            key = k[row, i, head]
            memory = memory + beta[row, i, head] * np.outer(key, v[row, i, head] - memory.T @ key)
            out[row, i, head] = memory.T @ q[row, i, head]
    return out


def test_the_delta_rule_is_a_loop():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(3, 12, 2, n)) for n in (5, 5, 4))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta, g = rng.random((3, 12, 2)), -rng.random((3, 12, 2))
    document = (rng.random((3, 12)) < 0.25).cumsum(1)
    found = sys.modules["mixing"].delta_rule(
        *map(jnp.float32, (q, k, v, beta, g)), jnp.asarray(document), 4
    )
    np.testing.assert_allclose(found, looped(q, k, v, beta, g, document), atol=1e-5)


def test_the_convolution_is_one_of_each_document():
    rng = np.random.default_rng(0)
    v, taps = (
        rng.normal(size=(1, 9, 2, 3)).astype(np.float32),
        rng.normal(size=(4, 3, 2)).astype(np.float32),
    )
    cuts = (0, 2, 7, 9)
    positions = np.concatenate([np.arange(b - a) for a, b in itertools.pairwise(cuts)])[None]
    expected = np.zeros(v.shape)
    for a, b in itertools.pairwise(cuts):
        for head, entry in np.ndindex(2, 3):
            expected[0, a:b, head, entry] = np.convolve(
                v[0, a:b, head, entry], taps[:, entry, head]
            )[: b - a]
    with jax.set_mesh(tiny.mesh("one device")):

        @tiny.per_device
        def run(
            v: f32["B/b L K/t D"], taps: f32["4 D K/t"], at: i32["B/b L"]
        ) -> f32["B/b L K/t D"]:
            taps = shardops.replicate("4 D K/t -> 4 D K/t *r *d", taps)
            return sys.modules["mixing"].convolve(v, taps, at)

        found = run(v, taps, positions.astype(np.int32))
    np.testing.assert_allclose(found, expected, atol=1e-5)
