"""Rules of attention: what a model asks of it, and paths that compute something else.

Their values: test_context.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

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


def test_a_window_of_nothing_is_refused():
    with pytest.raises(
        ValueError, match=r"Window\(0\) has no positions; its size must be at least 1"
    ):
        Window(0)


# ---- what a model asks of attention --------------------------------------------------------------


@pytest.mark.parametrize(("length", "size"), [(1, 1), (7, 3), (64, 64), (1000, 3), (64, 5000)])
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


def forward_of(kind, compute_dtype="f32", attention="auto", **changes) -> train.Forward:
    c = tiny.config(
        tiny.model(layers=4), compute_dtype=compute_dtype, attention=attention, **changes
    )
    return tiny.forward_of(kind(c.model), c.training)


def test_calls_are_those_of_each_layer_of_a_period():
    mesh = tiny.mesh("d=4 t=2")
    with jax.set_mesh(mesh):
        calls = calls_of(forward_of(Alternating), 256)
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
        forward = forward_of(Alternating, "bf16")
        check_paths(tiny.step_of(forward, 256))
        assert len(compared) == 2
        check_paths(tiny.step_of(forward, 128))  # einsum: there is nothing to compare
    with jax.set_mesh(make_mesh(jax.devices()[:4], d=2, p=2)):
        # stages, also where p does not divide the layers
        check_paths(
            tiny.step_of(tiny.forward(tiny.config(tiny.model(layers=3), attention="blockwise")), 16)
        )
    assert len(compared) == 3


def half_of_keys(q, k):
    return q.index - k.index < k.index.shape[-1] // 2


class OfOthers(train.Llama):
    """In training a window of half of the keys at hand, which are fewer in a block of keys."""

    def layer(self, x, w, tokens, attention):
        rule = AttentionMask((*MASKS, half_of_keys)) if tokens.training else self.mask
        return super().layer(x, w, tokens, lambda q, k, v, _: attention(q, k, v, rule))


@pytest.mark.long
def test_a_rule_of_training_alone_is_compared():
    with (
        jax.set_mesh(tiny.mesh("d=4 t=2")),
        pytest.raises(ValueError, match="attention by blockwise is not what"),
    ):
        check_paths(tiny.step_of(forward_of(OfOthers, attention="blockwise"), 32))


def sliding(q, k, v, mask):
    """As a user edits train.softmax_attention who wants a window."""
    rule = dataclasses.replace(mask.pattern, mask_mod=(*mask.pattern.mask_mod, Window(200)))
    return plain_attention(q, k, v, dataclasses.replace(mask, pattern=rule))


plain_attention = train.softmax_attention


@pytest.mark.long
def test_an_edit_of_one_path_alone_is_named(monkeypatch):
    monkeypatch.setattr(train, "softmax_attention", sliding)
    message = r"attention by blockwise is not what softmax_attention \(einsum\) computes"
    with jax.set_mesh(tiny.mesh("d=4 t=2")), pytest.raises(ValueError, match=message):
        check_paths(tiny.step_of(forward_of(train.Llama, "bf16"), 256))


def test_a_rule_that_is_none_is_refused():
    with pytest.raises(
        ValueError,
        match=r"^mask_mod=.* is not a tuple of functions: write \(causal, same_document\)",
    ):
        AttentionMask(mask_mod=[causal])


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("dropped", ["the last blocks", "later documents"])
def test_an_error_of_the_blocks_is_found(dropped, monkeypatch):
    """Blocks are small in the comparison, however large they are in the run."""
    seen = blockwise_module._seen_blocks

    def wrong(*args):
        first, last = seen(*args)
        return first, jnp.minimum(last, first + 1)

    if dropped == "later documents":
        plain = blockwise_module.blockwise

        def few(q, k, v, mask, block):
            positions = mask.queries._replace(document=jnp.minimum(mask.queries.document, 2))
            return plain(
                q, k, v, dataclasses.replace(mask, queries=positions, keys=positions), block
            )

        monkeypatch.setattr(attention_paths, "blockwise", few)
    else:
        monkeypatch.setattr(blockwise_module, "_seen_blocks", wrong)
    monkeypatch.setitem(blockwise_module.BLOCKS, "cpu", 512)
    with (
        jax.set_mesh(tiny.mesh("one device")),
        pytest.raises(ValueError, match="attention by blockwise is not what"),
    ):
        check_paths(tiny.step_of(forward_of(train.Llama, "bf16", attention="blockwise"), 256))


@pytest.mark.long
def test_values_of_another_device_of_a_ring_are_found(monkeypatch):
    """Those of the device opposite, in the forward pass alone."""
    in_turns = blockwise_module._in_turns

    def wrong(task, keys, carry, step, gradients=()):
        def opposite(x):
            return lax.ppermute(x, "c", [(i, (i + 2) % 4) for i in range(4)])

        keys = keys if gradients else keys._replace(v=opposite(keys.v))
        return in_turns(task, keys, carry, step, gradients)

    monkeypatch.setattr(blockwise_module, "_in_turns", wrong)
    with (
        jax.set_mesh(tiny.mesh("c=4")),
        pytest.raises(ValueError, match="attention by ring is not what"),
    ):
        check_paths(tiny.step_of(forward_of(train.Llama, context="ring"), 256))


@pytest.mark.long
def test_nan_on_one_device_is_found(monkeypatch):
    """Of queries of later documents that see nothing. They and their keys are on one device."""
    seen = blockwise_module._seen_blocks

    def first(positions):
        return positions._replace(document=jnp.ones_like(positions.document))

    monkeypatch.setattr(
        blockwise_module, "_seen_blocks", lambda task, q, positions: seen(task, q, first(positions))
    )
    with (
        jax.set_mesh(tiny.mesh("c=4")),
        pytest.raises(ValueError, match="attention by ring is not what"),
    ):
        check_paths(tiny.step_of(forward_of(train.Llama, context="ring"), 256))


def one_copy(x, repeats, axis):
    """jnp.repeat, in which the first copy alone has a gradient."""
    rest = jnp.repeat(lax.stop_gradient(x), repeats, axis).reshape(
        *x.shape[: axis + 1], repeats, *x.shape[axis + 1 :]
    )
    return (
        rest.at[(*[slice(None)] * (axis + 1), 0)]
        .set(x)
        .reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
    )


@pytest.mark.parametrize(
    ("wrong", "path"),
    [("order", "einsum"), pytest.param("one copy", "blockwise", marks=pytest.mark.long)],
)
def test_heads_that_ulysses_divides_otherwise_are_found(wrong, path, monkeypatch):
    """The proof's one device divides them as the mesh does, and einsum by ulysses would be as wrong
    as blockwise.
    """
    if wrong == "one copy":
        numpy = types.SimpleNamespace(**vars(jnp) | {"repeat": one_copy})
        monkeypatch.setattr(context_module, "jnp", numpy)
    else:
        ops = types.SimpleNamespace(
            **vars(shardops) | {"all_to_all": lambda s, x: shardops.all_to_all(s, flipped(s, x))}
        )

        def flipped(spec, x):
            return x[:, :, :, ::-1] if " H Q D -> " in spec else x

        monkeypatch.setattr(context_module, "shardops", ops)
    message = f"attention by ulysses, {path} is not what"
    forward = tiny.forward(
        tiny.config(tiny.model(n_kv=2, n_q_per_kv=4), context="ulysses", attention=path)
    )
    with jax.set_mesh(tiny.mesh("c=4")), pytest.raises(ValueError, match=message):
        check_paths(tiny.step_of(forward, 256))


@pytest.mark.long
def test_queries_of_a_ring_that_see_nothing_of_a_block_are_found(monkeypatch):
    """Where others of their block do. Here they attend to all of it."""
    scores_of = blockwise_module._scores

    def wrong(*args):
        scores, gradients = scores_of(*args)
        return jnp.where(
            jnp.all(jnp.isneginf(scores), axis=-1, keepdims=True), 0.0, scores
        ), gradients

    monkeypatch.setattr(blockwise_module, "_scores", wrong)
    with (
        jax.set_mesh(tiny.mesh("c=4")),
        pytest.raises(ValueError, match="attention by ring is not what"),
    ):
        check_paths(tiny.step_of(forward_of(train.Llama, context="ring"), 256))
