"""A trainer in Flax NNX, as its guide to several devices has it: modules, sharding names, optax;
XLA shards (GSPMD).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from bench.throughput.peers.job import Job
from bench.throughput.peers.plain_jax import (
    BETWEEN,
    DTYPES,
    SPECS,
    WITHIN,
    Sharded,
    attend,
    constrained,
    nested,
    rope_tables,
    rotate,
)


class Matrix(nnx.Module):
    """A weight that is used in the compute dtype, and the matmul that sums over its first dims."""

    def __init__(self, job: Job, name: str, weight: jax.Array):
        self.weight = nnx.Param(weight, sharding_names=tuple(SPECS[name]))
        self.dims = 3 if name == "w_o" else 1
        self.dtype = DTYPES[job.dtype]

    @property
    def used(self) -> jax.Array:
        return self.weight.astype(self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tensordot(x, self.used, self.dims)


def norm_of(job: Job, weight: jax.Array) -> nnx.RMSNorm:
    c = job.shapes
    dtype = DTYPES[job.dtype]
    return nnx.RMSNorm(
        c.d_model,
        epsilon=c.norm_epsilon,
        dtype=dtype,
        scale_init=lambda *_: weight,
        rngs=nnx.Rngs(0),
    )


def set_weights(module: nnx.Module, job: Job, weights: dict[str, Any]) -> None:
    """Gives a module its norms and matrices by name."""
    for name, weight in weights.items():
        setattr(module, name, norm_of(job, weight) if "norm" in name else Matrix(job, name, weight))


class Layer(nnx.Module):
    """Attention and SwiGLU, each after RMSNorm."""

    def __init__(self, job: Job, weights: dict[str, jax.Array]):
        self.job = job
        set_weights(self, job, weights)

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        nx = self.attention_norm(x)
        c = self.job.shapes
        q = self.w_q(nx).reshape(*x.shape[:2], c.heads, c.d_head)
        k = self.w_k(nx)
        v = self.w_v(nx)
        attended = attend(rotate(q, rope), rotate(k, rope), v, self.job.platform)
        attended = constrained(
            attended.reshape(*x.shape[:2], c.n_kv, c.n_q_per_kv, c.d_head), WITHIN
        )
        x = constrained(x + self.w_o(attended), BETWEEN)
        nx = self.mlp_norm(x)
        hidden = constrained(nnx.silu(self.w_gate(nx)) * self.w_up(nx), WITHIN)
        return constrained(x + self.w_down(hidden), BETWEEN)


class Transformer(nnx.Module):
    """The model."""

    def __init__(self, job: Job, weights: dict[str, jax.Array]):
        weights = nested(weights, job.shapes.layers)
        self.job = job
        self.layers = nnx.List([Layer(job, of_layer) for of_layer in weights.pop("layers")])
        set_weights(self, job, weights)

    def __call__(self, ids: jax.Array) -> jax.Array:
        rope = rope_tables(self.job.shapes, ids.shape[1])
        x = constrained(self.embed.used[ids], BETWEEN)
        for layer in self.layers:
            x = layer(x, rope)
        return constrained(jnp.einsum("blm,vm->blv", self.final_norm(x), self.unembed.used), WITHIN)


class Contestant(Sharded):
    """The trainer in Flax NNX."""

    def initial(self, weights: dict[str, jax.Array]) -> nnx.State:
        job = self.job
        model = Transformer(job, weights)
        adamw = optax.adamw(
            job.learning_rate, job.b1, job.b2, job.epsilon, weight_decay=job.weight_decay
        )
        optimizer = nnx.Optimizer(
            model, optax.chain(optax.clip_by_global_norm(job.clip_norm), adamw), wrt=nnx.Param
        )
        self.graph, state = nnx.split((model, optimizer))
        return state

    def shardings(self, state: nnx.State) -> nnx.State:
        return nnx.get_named_sharding(state, self.mesh)

    def training_step(
        self, state: nnx.State, ids: jax.Array, targets: jax.Array
    ) -> tuple[nnx.State, jax.Array]:
        model, optimizer = nnx.merge(self.graph, state)

        def loss_of(model: Transformer) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(
                model(ids).astype(jnp.float32), targets
            ).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss
