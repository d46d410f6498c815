"""Rules of attention: what a model asks of it, and paths that compute something else.

Their values: test_context.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from shardlib import shardops
from shardwright.cluster.devices import make_mesh
from shardwright.modeling import attention_paths, kernel_checks
from shardwright.modeling import blockwise as blockwise_module
from shardwright.modeling import context as context_module
from shardwright.modeling.attention_calls import calls_of
from shardwright.modeling.kernel_checks import check_paths
from shardwright.modeling.masks import AttentionMask, SoftCap, Window, causal, same_document
from shardwright.models import gpt2
from tests.support import tiny

MASKS = (causal, same_document)


def test_rules_that_are_none_are_refused():
    with pytest.raises(
        ValueError, match=r"Window\(0\) has no positions; its size must be at least"
    ):
        Window(0)
    with pytest.raises(
        ValueError, match=r"^mask_mod=.* is not a tuple of functions: write \(causal"
    ):
        AttentionMask(mask_mod=[causal])


# ---- what a model asks of attention --------------------------------------------------------------


@pytest.mark.parametrize(("length", "size"), [(1, 1), (64, 64), (1000, 3)])
def test_attended_keys_are_the_entries_of_the_mask(length, size):
    i, j = np.arange(length)[:, None], np.arange(length)
    masks = {
        (causal, same_document): j <= i,
        (causal, same_document, Window(size)): (j <= i) & (i - j < size),
        (Window(size), causal, Window(9)): (j <= i) & (i - j < min(size, 9)),
        (Window(size),): i - j < size,
        (): j >= 0,
        (causal, lambda q, k: q.index // 16 == k.index // 16): (j <= i) & (i // 16 == j // 16),
    }
    for visible, mask in masks.items():
        full = np.broadcast_to(mask, (length, length))
        assert AttentionMask(visible).attended(length) == pytest.approx(
            full.sum() / length, rel=1e-12
        )


def test_attended_keys_of_an_unknown_condition_in_a_long_sequence():
    known, unknown = (
        AttentionMask((causal, Window(1000))),
        AttentionMask((causal, lambda q, k: q.index - k.index < 1000)),
    )
    assert unknown.attended(2**17) == pytest.approx(known.attended(2**17), rel=0.02)
    for size in (512, 2048, 8192):
        blocks = AttentionMask((causal, lambda q, k, size=size: q.index // size == k.index // size))
        assert blocks.attended(2**17) == pytest.approx((size + 1) / 2, rel=0.12)


class Alternating(train.Llama):
    """Local and global layers in turn; those see soft-capped scores of another scale."""

    period = 2
    rules = AttentionMask((*MASKS, Window(3))), AttentionMask(score_mod=SoftCap(5), scale=0.3)

    def layer(self, x, w, tokens, attention):
        def of_turn(q, k, v, _):
            return attention(q, k, v, self.rules[tokens.index_in_period])

        return super().layer(x, w, tokens, of_turn)


def alternating() -> train.Forward:
    c = tiny.config(tiny.model(layers=4), compute_dtype="bf16")
    return tiny.forward_of(Alternating(c.model), c.training)


def test_calls_are_those_of_each_layer_of_a_period():
    mesh = tiny.mesh("d=4 t=2")
    with jax.set_mesh(mesh):
        calls = calls_of(alternating(), 256)
    assert [(call.place, call.pattern) for call in calls] == list(enumerate(Alternating.rules))
    assert {call.q.shape for call in calls} == {(1, 256, 4, 2, 4)}
    c = tiny.config(
        gpt2.ModelConfig(
            vocab=64, positions=16, d_model=32, layers=2, heads=8, dropout=0.1, bos_id=0
        )
    )
    with jax.set_mesh(mesh):
        assert [call.dropout for call in calls_of(tiny.forward(c), 16)] == [True]


# ---- the comparison before the first step --------------------------------------------------------


@pytest.mark.long
def test_paths_that_agree_pass(monkeypatch):
    compared = []
    plain = kernel_checks._differ
    monkeypatch.setattr(
        kernel_checks, "_differ", lambda given: compared.append(given) or plain(given)
    )
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        forward = alternating()
        check_paths(tiny.step_of(forward, 256))
        assert len(compared) == 2
        check_paths(tiny.step_of(forward, 128))  # einsum: there is nothing to compare
    with jax.set_mesh(make_mesh(jax.devices()[:4], d=2, p=2)):
        # stages, also where p does not divide the layers
        check_paths(
            tiny.step_of(tiny.forward(tiny.config(tiny.model(layers=3), attention="blockwise")), 16)
        )
    assert len(compared) == 3


# ---- paths that compute something else -----------------------------------------------------------


def of_one_path(monkeypatch):
    """As a user edits train.softmax_attention who wants a window."""
    plain = train.softmax_attention

    def sliding(q, k, v, mask):
        rule = dataclasses.replace(mask.pattern, mask_mod=(*mask.pattern.mask_mod, Window(200)))
        return plain(q, k, v, dataclasses.replace(mask, pattern=rule))

    monkeypatch.setattr(train, "softmax_attention", sliding)


def later_documents(monkeypatch):
    plain = blockwise_module.blockwise

    def few(q, k, v, mask, block):
        positions = mask.queries._replace(document=jnp.minimum(mask.queries.document, 2))
        return plain(q, k, v, dataclasses.replace(mask, queries=positions, keys=positions), block)

    monkeypatch.setattr(attention_paths, "blockwise", few)


def nan_on_one_device(monkeypatch):
    """Of queries of later documents that see nothing. They and their keys are on one device."""
    seen = blockwise_module._seen_blocks

    def wrong(task, q, positions):
        ones = jnp.ones_like(positions.document)
        return seen(task, q, positions._replace(document=ones))

    monkeypatch.setattr(blockwise_module, "_seen_blocks", wrong)


def heads_in_another_order(monkeypatch):
    """The proof's one device divides them as the mesh does."""

    def wrong(spec, x):
        return shardops.all_to_all(spec, x[:, :, :, ::-1] if " H Q D -> " in spec else x)

    ops = types.SimpleNamespace(**vars(shardops) | {"all_to_all": wrong})
    monkeypatch.setattr(context_module, "shardops", ops)


ULYSSES = {"context": "ulysses", "attention": "einsum"}
BLOCKS = {"attention": "blockwise", "compute_dtype": "bf16"}


@pytest.mark.parametrize(
    ("wrong", "mesh", "settings", "path"),
    [
        (heads_in_another_order, "c=4", ULYSSES, "ulysses, einsum"),
        pytest.param(of_one_path, "d=4 t=2", BLOCKS, "blockwise", marks=pytest.mark.long),
        pytest.param(later_documents, "one device", BLOCKS, "blockwise", marks=pytest.mark.long),
        pytest.param(nan_on_one_device, "c=4", {"context": "ring"}, "ring", marks=pytest.mark.long),
    ],
)
def test_a_path_that_computes_something_else_is_found(wrong, mesh, settings, path, monkeypatch):
    wrong(monkeypatch)
    forward = tiny.forward(tiny.config(tiny.model(n_kv=2, n_q_per_kv=4), **settings))
    message = rf"attention by {path} is not what softmax_attention \(einsum\) computes"
    with jax.set_mesh(tiny.mesh(mesh)), pytest.raises(ValueError, match=message):
        check_paths(tiny.step_of(forward, 256))
