"""Layers of several kinds: a block of two layers as the element of the stack, and a stack before
`layers`.

The block is a change of the model of docs/models.md; a dense computation on one device has its own
formulas. The stack is that of moe.py, whose values are compared in test_oracles.py.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import train
from shardlib.parsing import ShardError
from shardlib.shardtypes import Of, f32, make_shardings
from shardwright.modeling.model import load_model
from shardwright.models import moe
from shardwright.optimizers.scales import scales_of
from shardwright.program.checkpoint import Checkpointer
from tests.support import dense, tiny
from tests.support.own_model import MINE, SIZES, changed, imported

BLOCK = changed(
    MINE.replace('"mine"', '"block"'),
    """\
-from shardwright.modeling.masks import CAUSAL
+from shardwright.modeling.masks import CAUSAL, AttentionMask, Window, causal, same_document
@@
+@pytree_dataclass
+class Block:
+    window: Layer
+    full: Layer
+
+
 @pytree_dataclass
 class Weights:
     embed: unembedding["V/t/p M/fsdp"]  # also the output projection
-    layers: Array["layers/p", Layer]
+    layers: Array["layers/p", Block]
@@
     def layer(self, x, w, tokens, attention):
+        x = self.attend(x, w.window, attention, AttentionMask((causal, same_document, Window(3))))
+        return self.attend(x, w.full, attention, CAUSAL)
+
+    def attend(self, x, w, attention, mask):
@@
-        read = save_for_backward(attention(q[..., None, :], k, v, CAUSAL)[..., 0, :])
+        read = save_for_backward(attention(q[..., None, :], k, v, mask)[..., 0, :])
""",
)
MIXTURE = (Path(__file__).parents[2] / "shardwright/models/moe.py").read_text()


def mixture(of=moe, **changes) -> moe.ModelConfig:
    """Layers without experts before those with them."""
    sizes: dict[str, Any] = SIZES | {"n_q_per_kv": 2, "d_ff": 16, "dense_d_ff": 24, "layers": 2}
    experts = {"experts": 8, "experts_per_token": 2, "dense_layers": 1, "balance_loss": 0.1}
    return of.ModelConfig(**sizes | experts | changes)


# ---- a block -------------------------------------------------------------------------------------


def attend(x, w, document, window=None):
    nx = dense.rms(x, 1e-5)
    q, k, v = (jnp.einsum("blm,mkd->blkd", nx, matrix) for matrix in (w.w_q, w.w_k, w.w_v))
    i = np.arange(x.shape[1])
    sees = (i[:, None] >= i) & (document[:, :, None] == document[:, None, :])
    sees &= i[:, None] - i < (window or len(i))
    scores = jnp.einsum("blkd,bskd->bkls", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(sees[:, None], scores, -jnp.inf), -1)
    return x + jnp.einsum("bkls,bskd,kdm->blm", weights, v, w.w_out)


def dense_loss(w, batch):
    ids, _, document = dense.tokens_of(batch)
    x = w.embed[ids]
    for i in range(SIZES["layers"]):
        of = jax.tree.map(lambda stack, i=i: stack[i], w.layers)
        x = attend(attend(x, of.window, document, window=3), of.full, document)
    logits = dense.rms(x, 1e-5) @ w.embed.T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets.astype(np.int32))
    return jnp.sum(losses * batch.loss_mask) / batch.loss_mask.sum()


@pytest.mark.long
def test_loss_and_gradients_of_a_block_are_those_of_a_dense_computation(tmp_path):
    with imported("block", BLOCK, tmp_path) as block, jax.set_mesh(tiny.mesh("c=2 d=2 t=2")):
        c = tiny.config(block.ModelConfig(**SIZES), microbatches=2)

        @tiny.per_device
        def run(w: Of[block.Weights], batch: train.Batch) -> tuple[f32[""], Of[block.Weights]]:
            return tiny.loss_and_gradients(w, batch, c)

        w = tiny.state(c).weights
        found, found_g = jax.tree.map(np.asarray, run(w, tiny.place_batch(c)))
        w = jax.tree.map(np.asarray, w)
    loss, g = jax.jit(jax.value_and_grad(lambda w: dense_loss(w, tiny.host_batch())))(w)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (found_g, g)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


# ---- a stack before the layers -------------------------------------------------------------------


def trained(c, step, state, steps):
    """The State after steps, and their losses."""
    batch, losses = tiny.place_batch(c), []
    for i in steps:
        state, metrics = step(state, batch, np.int32(i))
        losses.append(float(metrics.loss))
    return state, losses


@pytest.mark.long
def test_a_run_goes_on_on_another_mesh(tmp_path):
    c = tiny.config(mixture(), microbatches=2)
    c.optimizer = dataclasses.replace(c.optimizer, algorithm="muon")
    with jax.set_mesh(tiny.mesh("one device")), Checkpointer(tmp_path) as checkpoints:
        step = tiny.training_step(c)
        state, _ = trained(c, step, tiny.state(c), range(2))
        checkpoints.save(2, state, {}, {})
        checkpoints.wait()
        _, expected = trained(c, step, state, range(2, 4))
    with jax.set_mesh(tiny.mesh("p=2 e=2 t=2")), Checkpointer(tmp_path) as checkpoints:
        fresh = jax.eval_shape(lambda: tiny.state(c))
        shardings = make_shardings(train.State[moe.Weights], like=fresh)
        like = jax.tree.map(lambda x, s: x.update(sharding=s), fresh, shardings)
        state = checkpoints.restore(2, like, orders={})
        spec = state.weights.dense.w_down.sharding.spec
        assert spec == P(None, "t", ("d", "e", "p"))
        _, losses = trained(c, tiny.training_step(c), state, range(2, 4))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.quick
def test_mup_scales_each_kind_of_layer():
    c = tiny.optimizer(parametrization="completep", base={"layers": 2, "dense_layers": 1})
    found = scales_of(c, load_model(mixture(dense_layers=2, layers=4)))
    scaled = found.dense.w_down, found.dense.w_o, found.layers.w_down
    assert {x.multiplier for x in scaled} == {0.5}
    assert (found.dense.w_q.depth, found.layers.w_q.depth, found.embed.depth) == (2, 2, 1)


@pytest.mark.quick
def test_a_stack_that_is_not_run_is_refused(tmp_path):
    layers = '    layers: Array["layers/p", Layer]\n'
    source = MINE.replace(layers, f'    dense: Array["4", Layer]\n{layers}')
    message = r"weights `dense` are a stack that is not run; write Array\['dense \*p', …\] for"
    with imported("odd", source, tmp_path) as odd, pytest.raises(ValueError, match=message):
        load_model(odd.ModelConfig(**SIZES, module="odd"))


@pytest.mark.quick
def test_a_loss_in_a_stack_before_the_layers_is_refused(tmp_path):
    of_super = "return super().layer(x, w, tokens, attention)"
    source = MIXTURE.replace(of_super, f"{of_super}, LayerAux(jnp.zeros(()))")
    refused = r"lossy.py:\d+: a layer of the stack `dense` returns a loss or metrics"
    with imported("lossy", source, tmp_path) as lossy, jax.set_mesh(tiny.mesh("one device")):
        step = tiny.step(tiny.config(mixture(lossy, module="lossy")))
        with pytest.raises(ShardError, match=refused):
            assert step.lowered
