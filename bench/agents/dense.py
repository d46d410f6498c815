"""Compares a model of a working copy with whole arrays in NumPy's f64. Runs in the copy, as a script.

It shares nothing with the source but the weights: norms, RoPE, masks, softmax, routing and losses are its own.
"""

import dataclasses
import json
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.shardtypes import Of, f32, make_shardings, typed_shard_map
from shardwright import train
from shardwright.cluster.devices import make_mesh
from shardwright.data.loader import TokenBatch, in_microbatches
from shardwright.modeling.forward import Forward
from shardwright.modeling.model import act, compute_scope, load_model
from shardwright.modeling.weights import shapes_of
from shardwright.run.launch import composed

ROWS, LENGTH, STEP = 4, 48, 1e-5


def softmax(x: np.ndarray) -> np.ndarray:
    terms = np.exp(x - x.max(-1, keepdims=True))
    return terms / terms.sum(-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """Whether each entry is one of the k largest along the last dim."""
    return x >= np.sort(x, -1)[..., -k, None]


class Dense:
    """The Llama with grouped queries. A feature changes `maps`, `turn`, `heads` or `mlp`."""

    def __init__(self, c: Any, batch: TokenBatch):
        self.c = c
        before = np.pad(batch.targets[:, :-1], ((0, 0), (1, 0)))
        self.ids, self.document = np.where(batch.is_seq_start, c.bos_id, before), batch.is_seq_start.cumsum(1)
        place = np.arange(LENGTH)
        self.position = place - np.maximum.accumulate(np.where(batch.is_seq_start, place, 0), 1)
        same = self.document[:, :, None] == self.document[:, None]
        self.seen = (same & (place[:, None] >= place))[:, None, None]

    def norm(self, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.c.norm_epsilon)

    def turn(self, x: np.ndarray) -> np.ndarray:
        n = x.shape[-1] // 2
        angle = self.position[..., None] * self.c.rope_base ** (-np.arange(n) / n)
        turned = (x[..., :n] + 1j * x[..., n:]) * np.exp(1j * angle.reshape(*angle.shape[:2], *[1] * (x.ndim - 3), n))
        return np.concatenate([turned.real, turned.imag], -1)

    def scores(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return np.einsum("blkqd,bskd->bkqls", q, k) / np.sqrt(q.shape[-1])

    def maps(self, q: np.ndarray, k: np.ndarray, of: Any, layer: int) -> np.ndarray:
        return softmax(np.where(self.seen, self.scores(q, k), -np.inf))

    def heads(self, x: np.ndarray, layer: int) -> np.ndarray:
        return x

    def experts(self, x: np.ndarray, of: Any) -> np.ndarray:
        gate = np.einsum("blm,emf->eblf", x, of.w_gate)
        hidden = gate * sigmoid(gate) * np.einsum("blm,emf->eblf", x, of.w_up)
        return np.einsum("eblf,efm->blem", hidden, of.w_down)

    def mlp(self, x: np.ndarray, of: Any) -> tuple[np.ndarray, Any]:
        one = SimpleNamespace(w_gate=of.w_gate[None], w_up=of.w_up[None], w_down=of.w_down[None])
        return self.experts(x, one)[:, :, 0], 0

    def outputs(self, w: Any) -> tuple[np.ndarray, float]:
        """Logits, and the sum of the losses of layers."""
        x, losses = w.embed[self.ids], 0.0
        for i in range(self.c.layers):
            of = SimpleNamespace(**{name: value[i] for name, value in vars(w.layers).items() if value is not None})
            h = self.norm(x) * of.attention_norm
            q, k, v = (np.einsum("blm,m...->bl...", h, weight) for weight in (of.w_q, of.w_k, of.w_v))
            attended = np.einsum("bkqls,bskd->blkqd", self.maps(self.turn(q), self.turn(k), of, i), v)
            x = x + np.einsum("blkqd,kqdm->blm", self.heads(attended, i), of.w_o)
            out, loss = self.mlp(self.norm(x) * of.mlp_norm, of)
            x, losses = x + out, losses + loss
        return self.norm(x) * w.final_norm @ w.unembed.T, losses


class Differential(Dense):
    """Two maps, of which one is subtracted."""

    def turn(self, x: np.ndarray) -> np.ndarray:
        return np.concatenate([super(Differential, self).turn(half) for half in np.split(x, 2, -1)], -1)

    def base(self, layer: int) -> float:
        return 0.8 - 0.6 * np.exp(-0.3 * layer)

    def maps(self, q: np.ndarray, k: np.ndarray, of: Any, layer: int) -> np.ndarray:
        (q1, q2), (k1, k2) = np.split(q, 2, -1), np.split(k, 2, -1)
        first, last = (super(Differential, self).maps(*x, of, layer) for x in ((q1, k1), (q2, k2)))
        factor = np.exp(of.lambda_q1 @ of.lambda_k1) - np.exp(of.lambda_q2 @ of.lambda_k2) + self.base(layer)
        return first - factor * last

    def heads(self, x: np.ndarray, layer: int) -> np.ndarray:
        return (1 - self.base(layer)) * self.norm(x)


class Moba(Dense):
    """Maps of chosen blocks."""

    def maps(self, q: np.ndarray, k: np.ndarray, of: Any, layer: int) -> np.ndarray:
        size, place = self.c.block, np.arange(LENGTH)
        means = k.reshape(len(k), -1, size, *k.shape[2:]).mean(2)
        own, block = place[:, None] // size, np.arange(LENGTH // size)
        competes = (block < own) & (self.document[:, :, None] == self.document[:, None, ::size])
        scores = np.where(competes[:, None, None], self.scores(q, means), -np.inf)
        chosen = (largest(scores, self.c.best) & (scores > -np.inf)) | (block == own)
        return softmax(np.where(self.seen & np.repeat(chosen, size, -1), self.scores(q, k), -np.inf))


class Moepp(Dense):
    """Experts, and three that compute nothing."""

    def mlp(self, x: np.ndarray, of: Any) -> tuple[np.ndarray, Any]:
        scores = softmax(x @ of.router)
        chosen = largest(scores, self.c.experts_per_token)
        mix = softmax(x @ of.mix)
        constant = mix[..., :1] * x + mix[..., 1:] * of.constant
        out = np.concatenate([self.experts(x, of), *(y[:, :, None] for y in (0 * x, x, constant))], 2)
        weight = np.array([1.0] * self.c.experts + [self.c.tau] * 3)
        loss = scores.shape[-1] * (weight * chosen.mean(1) * scores.mean(1)).sum(-1).mean()
        return np.einsum("ble,blem->blm", chosen * scores, out), self.c.balance_loss * loss


class Dynmoe(Dense):
    """Experts by thresholds."""

    def mlp(self, x: np.ndarray, of: Any) -> tuple[np.ndarray, Any]:
        lengths = np.linalg.norm(of.router, axis=0)
        scores = sigmoid(x @ of.router / lengths / np.linalg.norm(x, axis=-1, keepdims=True))
        active = scores > sigmoid(of.threshold)
        active |= largest(scores, 1) & ~active.any(-1, keepdims=True)
        loss = np.linalg.norm(of.router.T @ of.router - np.eye(len(lengths))) + lengths.mean()
        out = np.einsum("ble,blem->blm", active / active.sum(-1, keepdims=True), self.experts(x, of))
        return out, self.c.balance_loss * loss


def compare(name: str, settings: list[str], learned: list[str]) -> dict[str, float]:
    """Differences between the copy's model and the dense one, as shares of the largest entry or of the number."""
    config, *rest = settings
    plain = [f"training.batch_size={ROWS}", f"training.seq_len={LENGTH}", "training.compute_dtype=f32"]
    one = [f"mesh.{axis}=1" for axis in "rdect"]
    c = composed(config.partition("=")[2], *rest, *plain, *one, "model.d_model=64", "model.vocab=64")
    model: Any = load_model(c.model)
    rng = np.random.default_rng(0)
    starts = rng.random((ROWS, LENGTH)) < 0.06
    starts[:, 0] = True
    batch = TokenBatch(rng.integers(0, 64, (ROWS, LENGTH)).astype(np.uint32), starts, np.ones_like(starts))
    forward = Forward(model, c.training, train.softmax_attention, in_training=True)

    @typed_shard_map
    def outputs(w: Of[model.Weights], batch: TokenBatch) -> tuple[act["B/b L/c V/t/p"], f32[""]]:
        tokens = forward.tokens(batch)
        whole = forward.gatherable(w)
        x, _, aux = forward.layers(whole.layers, forward.embed(whole, tokens), tokens)
        return model.logits(whole, x), jnp.float32(0 if aux.loss is None else jnp.sum(aux.loss))

    @typed_shard_map
    def gradients(w: Of[model.Weights], batch: train.Batch) -> tuple[f32[""], Of[model.Weights]]:
        return train.loss_and_gradients(w, batch, None, c, forward)[:2]

    def draw(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        return (0.2 * rng.standard_normal(shape.shape)).astype(np.float32)

    with jax.set_mesh(make_mesh(jax.devices()[:1])), compute_scope("f32"), jax.default_matmul_precision("highest"):
        weights, direction = (jax.tree.map(draw, shapes_of(model.table)) for _ in range(2))
        w = jax.tree.map(jax.device_put, weights, make_shardings(model.Weights, like=weights))
        logits, losses = jax.jit(outputs)(w, batch)
        loss, g = jax.jit(gradients)(w, in_microbatches(batch, c.training.microbatches))
    losses, loss = float(losses), float(loss)
    dense = FEATURES[name](c.model, batch)

    def at(step: float) -> tuple[np.ndarray, float, float]:
        moved = jax.tree.map(lambda x, y: np.float64(x) + step * np.float64(y), weights, direction)
        found, of_layers = dense.outputs(
            SimpleNamespace(**{f.name: getattr(moved, f.name) for f in dataclasses.fields(moved)})
        )
        log_p = np.log(softmax(found))
        return (
            found,
            of_layers,
            of_layers - np.take_along_axis(log_p, batch.targets.astype(np.int64)[..., None], -1).mean(),
        )

    expected, of_layers, total = at(0)
    slope = (at(STEP)[2] - at(-STEP)[2]) / (2 * STEP)
    found = sum(np.vdot(np.float64(x), y) for x, y in zip(jax.tree.leaves(g), jax.tree.leaves(direction), strict=True))
    unused = [key for key in learned if not np.any(np.asarray(getattr(g.layers, key)))]
    differences = {"logits": np.abs(np.asarray(logits) - expected).max() / np.abs(expected).max()}
    differences |= {
        "losses of layers": abs(losses - of_layers) / max(1, abs(of_layers)),
        "loss": abs(loss - total) / total,
    }
    if name != "dynmoe":  # whose gradients pass through a comparison
        differences["gradients"] = abs(found - slope) / abs(slope)
    return {key: float(x) for key, x in differences.items()} | {f"no gradient of {key}": 1.0 for key in unused}


FEATURES = {"differential": Differential, "moba": Moba, "moepp": Moepp, "dynmoe": Dynmoe}


if __name__ == "__main__":
    print(json.dumps(compare(*json.loads(sys.argv[1]))))
