"""Layers of several kinds: a block of two layers as the element of the stack, and a stack before
`layers`.

The models are changes of the one of docs/models.md. A dense computation on one device has its own
formulas.
"""

import contextlib
import dataclasses
import functools
import re
import sys
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
from shardwright.inspect.causality import describe_causality
from shardwright.inspect.soundness import find_unsound
from shardwright.modeling.model import load_model
from shardwright.models import moe
from shardwright.optimizers.scales import scales_of
from shardwright.program.checkpoint import Checkpointer
from tests.support import dense, tiny
from tests.support.own_model import MINE, SIZES, changed, imported
from tests.support.proofs import found_soon

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
TWO = changed(
    MINE.replace('"mine"', '"two"'),
    """\
 import dataclasses
+from typing import ClassVar
+
+import jax
@@
     module: str = "two"
+    dense_layers: int = 2
+    dims: ClassVar[dict] = settings.ModelConfig.dims | {"dense": "dense_layers"}
@@
+@pytree_dataclass
+class Dense(Layer):
+    w_up: matrix["M/fsdp -> F/t"]
+    w_down: matrix["F/t -> M/fsdp"]
+
+
 @pytree_dataclass
 class Weights:
     embed: unembedding["V/t/p M/fsdp"]  # also the output projection
+    dense: Array["dense *p", Dense] | None  # None if dense_layers is 0
@@
-        return x + psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)
+        x = x + psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)
+        return self.mlp(x, w) if isinstance(w, Dense) else x
+
+    def mlp(self, x, w):
+        nx = all_gather("B/b L/c/t M -> B/b L/c M", unit_rms(x, 1e-5).astype(x.dtype))
+        w_up = all_gather("M/fsdp F/t -> M F/t", w.w_up)
+        hidden = save_for_backward(jax.nn.relu(matmul("B/b L/c M, M F/t -> B/b L/c F/t", nx, w_up)))
+        w_down = all_gather("F/t M/fsdp -> F/t M", w.w_down)
+        out = matmul("B/b L/c F/t, F/t M -> B/b L/c M +t", hidden, w_down)
+        return x + psum_scatter("B/b L/c M +t -> B/b L/c/t M", out)
""",
)
MIXED = changed(
    TWO.replace('"two"', '"mixed"'),
    """\
-from shardwright.modeling.weights import matrix, table_of, unembedding
+from shardwright.modeling.weights import gain, matrix, table_of, unembedding
@@
+from shardlib.shardops import broadcast
 from shardlib.shardtypes import Array, pytree_dataclass
@@
-class Dense(Layer):
+class Mlp:
@@
     w_down: matrix["F/t -> M/fsdp"]
+
+
+@pytree_dataclass
+class Dense:
+    attention: Layer
+    mlps: Array["3", Mlp]
+    scale: gain["M"]
+    slope: gain["3"]
@@
-    layers: Array["layers/p", Layer]
+    layers: Array["layers/p", Dense]
@@
     def layer(self, x, w, tokens, attention):
+        x = self.attend(x, w.attention, tokens, attention)
+        for i in range(3):
+            x = self.mlp(x, jax.tree.map(lambda stack: stack[i], w.mlps))
+        slope = broadcast("3 -> B/b L/c/t 3", all_gather("3/t/fsdp -> 3", w.slope))
+        x = einsum_unreduced("B/b L/c/t M, M -> B/b L/c/t M", x, all_gather("M/t/fsdp -> M", w.scale))
+        return (x * slope.mean(-1, keepdims=True)).astype(jnp.float32)
+
+    def attend(self, x, w, tokens, attention):
@@
-        return self.mlp(x, w) if isinstance(w, Dense) else x
+        return x
@@
-import jax
+import jax
+import jax.numpy as jnp
""",
)
"""Vectors, one too small for a mesh, and parts that are stacks themselves, in both stacks."""
MODELS = {"block": BLOCK, "two": TWO, "mixed": MIXED}


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory):
    at = tmp_path_factory.mktemp("models")
    with contextlib.ExitStack() as stack:
        for name, source in MODELS.items():
            stack.enter_context(imported(name, source, at))
        yield


def config(module: str, **training):
    return tiny.config(sys.modules[module].ModelConfig(**SIZES), **training)


# ---- a dense computation -------------------------------------------------------------------------


def attend(x, w, document, window=None):
    nx = dense.rms(x, 1e-5)
    q, k, v = (jnp.einsum("blm,mkd->blkd", nx, matrix) for matrix in (w.w_q, w.w_k, w.w_v))
    i = np.arange(x.shape[1])
    sees = (i[:, None] >= i) & (document[:, :, None] == document[:, None, :])
    sees &= i[:, None] - i < (window or len(i))
    scores = jnp.einsum("blkd,bskd->bkls", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(sees[:, None], scores, -jnp.inf), -1)
    return x + jnp.einsum("bkls,bskd,kdm->blm", weights, v, w.w_out)


def mlp(x, w):
    return x + jnp.maximum(dense.rms(x, 1e-5) @ w.w_up, 0) @ w.w_down


def rows(stack):
    return [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(len(jax.tree.leaves(stack)[0]))]


def of_block(x, w, document):
    return attend(attend(x, w.window, document, window=3), w.full, document)


def of_two(x, w, document):
    x = attend(x, w, document)
    return mlp(x, w) if hasattr(w, "w_up") else x


def of_mixed(x, w, document):
    x = attend(x, w.attention, document)
    for part in rows(w.mlps):
        x = mlp(x, part)
    return x * w.scale * jnp.mean(w.slope)


LAYER = {"block": of_block, "two": of_two, "mixed": of_mixed}


def dense_logits(w, tokens, layer):
    ids, _, document = tokens
    x = w.embed[ids]
    for each in [*(rows(w.dense) if hasattr(w, "dense") else ()), *rows(w.layers)]:
        x = layer(x, each, document)
    return dense.rms(x, 1e-5) @ w.embed.T


def dense_loss(w, batch, layer):
    logits = dense_logits(w, dense.tokens_of(batch), layer)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets.astype(np.int32))
    return jnp.sum(losses * batch.loss_mask) / batch.loss_mask.sum()


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def unlike_ones(w):
    """Vectors that are not all 1."""
    return jax.tree.map(lambda x: x * (1 + 0.1 * jnp.cos(jnp.arange(x.size).reshape(x.shape))), w)


@functools.cache
def expected(module: str):
    c = config(module)
    with jax.set_mesh(tiny.mesh("one device")):
        w = on_host(jax.jit(unlike_ones)(tiny.state(c).weights))
    return w, jax.value_and_grad(dense_loss)(w, tiny.host_batch(), LAYER[module])


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "place"),
    [("block", "c=2 d=2 t=2"), ("two", "p=2 d=2 t=2"), ("mixed", "p=2 d=2 t=2")],
)
def test_loss_and_gradients_are_those_of_a_dense_computation(module, place):
    c = config(module, microbatches=2)
    w, (loss, g) = expected(module)
    Weights = load_model(c.model).Weights
    with jax.set_mesh(tiny.mesh(place)):

        @tiny.per_device
        def run(w: Of[Weights], batch: tiny.train.Batch) -> tuple[f32[""], Of[Weights]]:
            return tiny.loss_and_gradients(w, batch, c)

        found, found_g = run(tiny.place(w, Weights), tiny.place_batch(c))
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        on_host(found_g),
        on_host(g),
    )


# ---- the proof -----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_block_is_proved():
    with jax.set_mesh(tiny.mesh("p=2 d=2 t=2")):
        step = tiny.step(config("block", microbatches=2))
        assert find_unsound(step) == []
        assert describe_causality(step).endswith(
            "no position sees a later token or another document"
        )


OF_MESH = "a number that depends on the mesh: 2"
WRONG = {
    "block": (
        "return self.attend(x, w.full, attention, CAUSAL)",
        "return FOUND * shardops.axis_size('d')",
    ),
    "dense": ("return self.mlp(x, w) if", "return self.mlp(x, w) * shardops.axis_size('d') if"),
    "layers": (
        "if isinstance(w, Dense) else x",
        "if isinstance(w, Dense) else x * shardops.axis_size('d')",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("where", WRONG)
def test_a_wrong_edit_of_each_kind_of_layer_is_found(where, tmp_path):
    old, new = WRONG[where]
    source = BLOCK if where == "block" else TWO
    assert source.count(old) == 1
    source = source.replace(old, new.replace("FOUND", old.removeprefix("return ")))
    name = f"wrong_{where}"
    source = re.sub(r'module: str = "\w+"', f'module: str = "{name}"', source)
    with (
        imported(name, f"from shardlib import shardops\n{source}", tmp_path),
        jax.set_mesh(tiny.mesh("p=2 d=2 t=2")),
    ):
        found = found_soon(tiny.step(config(name)), lambda text: OF_MESH in text)
    assert OF_MESH in found, found
    assert f"{name}.py:" in found


# ---- the rest of a run ---------------------------------------------------------------------------


def trained(c, state, steps):
    """The State after steps, and their losses."""
    batch, step = tiny.place_batch(c), tiny.training_step(c)
    losses = []
    for i in steps:
        state, metrics = step(state, batch, np.int32(i))
        losses.append(float(metrics.loss))
    return state, losses


@pytest.mark.long
def test_a_run_goes_on_on_another_mesh(tmp_path):
    c = config("mixed", microbatches=2)
    c.optimizer = dataclasses.replace(c.optimizer, algorithm="muon")
    State = train.State[load_model(c.model).Weights]
    with jax.set_mesh(tiny.mesh("one device")):
        _, expected = trained(c, tiny.state(c), range(4))
    with jax.set_mesh(tiny.mesh("d=4 t=2")), Checkpointer(tmp_path) as checkpoints:
        state, losses = trained(c, tiny.state(c), range(2))
        checkpoints.save(2, state, {}, {})
    with jax.set_mesh(tiny.mesh("p=2 d=2 t=2")), Checkpointer(tmp_path) as checkpoints:
        fresh = jax.eval_shape(lambda: tiny.state(c))
        like = jax.tree.map(
            lambda x, s: x.update(sharding=s), fresh, make_shardings(State, like=fresh)
        )
        state = checkpoints.restore(2, like, orders={})
        assert state.weights.dense.attention.w_q.sharding.spec == P(None, ("d", "p"), "t", None)
        losses += trained(c, state, range(2, 4))[1]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert expected[-1] < expected[0] - 0.1


@pytest.mark.quick
def test_mup_scales_each_kind_of_layer():
    c = tiny.optimizer(parametrization="completep", base={"layers": 2, "dense_layers": 1})
    two: Any = load_model(config("two").model)
    two.multipliers = {"residual": ["w_out", "w_down"]}
    found = scales_of(c, two)
    scaled = found.dense.w_out, found.dense.w_down, found.layers.w_out
    assert {x.multiplier for x in scaled} == {0.5}
    assert (found.dense.w_q.depth, found.layers.w_q.depth, found.embed.depth) == (2, 2, 1)
    assert found.dense.w_q.multiplier == 1
    block: Any = load_model(config("block").model)
    block.multipliers = {"residual": ["full.w_out"]}
    found = scales_of(tiny.optimizer(parametrization="completep", base={"layers": 1}), block)
    assert (found.layers.full.w_out.multiplier, found.layers.window.w_out.multiplier) == (0.25, 1)
    found = scales_of(c, load_model(mixture(dense_layers=2, layers=4)))
    scaled = found.dense.w_down, found.dense.w_o, found.layers.w_down
    assert {x.multiplier for x in scaled} == {0.5}


# ---- moe.py: dense layers before those with experts ----------------------------------------------


def mixture(**changes) -> moe.ModelConfig:
    sizes: dict[str, Any] = SIZES | {"n_q_per_kv": 2, "d_ff": 16, "dense_d_ff": 24, "layers": 2}
    experts = {"experts": 8, "experts_per_token": 2, "dense_layers": 1, "balance_loss": 0.1}
    return moe.ModelConfig(**sizes | experts | changes)


@pytest.mark.long
def test_dense_layers_before_experts():
    c = tiny.config(mixture(), microbatches=2)
    with jax.set_mesh(tiny.mesh("one device")):
        expected = trained(c, tiny.state(c), range(2))[1]
    with jax.set_mesh(tiny.mesh("p=2 e=2 t=2")):
        np.testing.assert_allclose(trained(c, tiny.state(c), range(2))[1], expected, rtol=1e-4)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"dense *p"',
            '"dense"',
            r"weights `dense` are a stack that is not run; write Array\['dense \*p', …\] for",
        ),
        (
            '"layers/p", Layer',
            '"dense/p", Layer',
            r"a stack of shape \(2, 32, 4, 8\) in `layers`; .* model.layers = 4",
        ),
    ],
)
def test_what_is_declared_wrong_is_told(old, new, message, tmp_path):
    assert TWO.count(old) == 1
    source = TWO.replace('"two"', '"odd"').replace(old, new)
    with imported("odd", source, tmp_path) as odd, pytest.raises(ValueError, match=message):
        load_model(odd.ModelConfig(**SIZES))


@pytest.mark.quick
def test_a_loss_in_a_stack_before_the_layers_is_refused(tmp_path):
    source = TWO.replace('"two"', '"lossy"').replace(
        "return self.mlp(x, w) if", "return (self.mlp(x, w), LayerAux(jax.numpy.zeros(()))) if"
    )
    source = f"from shardlib.layers import LayerAux\n{source}"
    refused = r"lossy.py:\d+: a layer of the stack `dense` returns a loss or metrics"
    with imported("lossy", source, tmp_path), jax.set_mesh(tiny.mesh("one device")):
        step = tiny.step(config("lossy"))
        with pytest.raises(ShardError, match=refused):
            assert step.lowered


@pytest.mark.quick
def test_no_layers_before_the_others():
    c = tiny.config(sys.modules["two"].ModelConfig(**SIZES, dense_layers=0))
    assert load_model(c.model).table.dense is None
    with jax.set_mesh(tiny.mesh("p=2 d=2")):
        assert tiny.step(c).traced
