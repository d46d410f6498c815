"""A trainer in Flax NNX and optax, as in their tutorials. The step is jitted over a split model, and donates it."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.throughput.peers.jax_peer import DTYPES, JaxPeer, attend, rope_tables, rotate
from benchmarks.throughput.peers.job import Job, Shapes


class _Attention(nnx.Module):
    def __init__(self, c: Shapes, dtype, rngs: nnx.Rngs):
        linear = functools.partial(nnx.LinearGeneral, use_bias=False, dtype=dtype, rngs=rngs)
        self.q = linear(c.d_model, (c.heads, c.d_head))
        self.k = linear(c.d_model, (c.n_kv, c.d_head))
        self.v = linear(c.d_model, (c.n_kv, c.d_head))
        self.o = linear((c.heads, c.d_head), c.d_model, axis=(-2, -1))

    def __call__(self, x, rope):
        return self.o(attend(rotate(self.q(x), rope), rotate(self.k(x), rope), self.v(x)))


class _FeedForward(nnx.Module):
    def __init__(self, c: Shapes, dtype, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.gate, self.up = linear(c.d_model, c.d_ff), linear(c.d_model, c.d_ff)
        self.down = linear(c.d_ff, c.d_model)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class _Block(nnx.Module):
    def __init__(self, c: Shapes, dtype, rngs: nnx.Rngs):
        norm = functools.partial(nnx.RMSNorm, c.d_model, epsilon=c.norm_epsilon, dtype=dtype, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention, self.feed_forward = _Attention(c, dtype, rngs), _FeedForward(c, dtype, rngs)

    def __call__(self, x, rope):
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.mlp_norm(x))


class _Llama(nnx.Module):
    def __init__(self, c: Shapes, dtype, rngs: nnx.Rngs):
        self.c = c
        self.embed = nnx.Embed(c.vocab, c.d_model, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([_Block(c, dtype, rngs) for _ in range(c.layers)])
        self.norm = nnx.RMSNorm(c.d_model, epsilon=c.norm_epsilon, dtype=dtype, rngs=rngs)
        self.unembed = nnx.Linear(c.d_model, c.vocab, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, ids):
        rope = rope_tables(self.c, ids.shape[1])
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, rope)
        return self.unembed(self.norm(x))


def load(model: _Llama, weights: dict[str, np.ndarray]) -> None:
    """Puts weights in train.py's layout into `model`."""
    c = model.c
    model.embed.embedding[...] = weights["embed"]
    model.norm.scale[...] = weights["final_norm"]
    model.unembed.kernel[...] = weights["unembed"].T
    for i, block in enumerate(model.blocks):
        w = {name: x[i] for name, x in weights.items() if len(x) == c.layers and name not in ("embed", "unembed")}
        block.attention_norm.scale[...], block.mlp_norm.scale[...] = w["attention_norm"], w["mlp_norm"]
        block.attention.q.kernel[...] = w["w_q"].reshape(c.d_model, c.heads, c.d_head)
        block.attention.k.kernel[...], block.attention.v.kernel[...] = w["w_k"], w["w_v"]
        block.attention.o.kernel[...] = w["w_o"].reshape(c.heads, c.d_head, c.d_model)
        block.feed_forward.gate.kernel[...], block.feed_forward.up.kernel[...] = w["w_gate"], w["w_up"]
        block.feed_forward.down.kernel[...] = w["w_down"]


class Contestant(JaxPeer):
    """The trainer in Flax NNX."""

    def initial(self, job: Job, weights: dict[str, np.ndarray] | None):
        """The state before the first step, from these weights or random ones."""
        tx = optax.chain(
            optax.clip_by_global_norm(job.clip_norm),
            optax.adamw(job.learning_rate, job.b1, job.b2, job.epsilon, weight_decay=job.weight_decay),
        )

        @nnx.jit
        def create():
            model = _Llama(job.shapes, DTYPES[job.dtype], nnx.Rngs(job.seed))
            return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

        model, optimizer = create()
        if weights is not None:
            load(model, weights)
        self.graph, state = nnx.split((model, optimizer))
        return state

    def training_step(self, state, ids, targets):
        """One step: the next state and the loss."""
        model, optimizer = nnx.merge(self.graph, state)

        def loss_of(model):
            logits = model(ids).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss
