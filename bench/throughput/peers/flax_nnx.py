"""A trainer in Flax NNX, as its guide to several devices has it: modules, sharding names, optax; XLA shards (GSPMD)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bench.throughput.peers.job import Job, batches, inputs_of
from bench.throughput.peers.plain_jax import (
    BETWEEN,
    BY_ROW,
    DTYPES,
    HEADS,
    HIDDEN,
    SPECS,
    OnJax,
    attend,
    mesh_of,
    rope_tables,
    rotate,
)

constrained = jax.lax.with_sharding_constraint


class Matrix(nnx.Module):
    """A product with a weight whose first dims are summed over, in the compute dtype."""

    def __init__(self, job: Job, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], rngs: nnx.Rngs):
        draw = nnx.with_partitioning(nnx.initializers.normal(job.shapes.d_model**-0.5), tuple(SPECS[name]))
        self.weight = nnx.Param(draw(rngs.params(), (*inputs, *outputs), jnp.float32))
        self.dims, self.dtype = len(inputs), DTYPES[job.dtype]

    @property
    def used(self) -> jax.Array:
        """The weight in the compute dtype."""
        return self.weight.astype(self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tensordot(x, self.used, self.dims)


class Layer(nnx.Module):
    """Attention and SwiGLU, each after RMSNorm."""

    def __init__(self, job: Job, rngs: nnx.Rngs):
        c = job.shapes
        model, kv, heads, hidden = (c.d_model,), (c.n_kv, c.d_head), (c.n_kv, c.n_q_per_kv, c.d_head), (c.d_ff,)
        norm = functools.partial(nnx.RMSNorm, c.d_model, epsilon=c.norm_epsilon, dtype=DTYPES[job.dtype], rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        shapes = {"w_q": (model, heads), "w_k": (model, kv), "w_v": (model, kv), "w_o": (heads, model)}
        shapes |= {"w_gate": (model, hidden), "w_up": (model, hidden), "w_down": (hidden, model)}
        for name, (inputs, outputs) in shapes.items():
            setattr(self, name, Matrix(job, name, inputs, outputs, rngs))
        self.job = job

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        nx, c = self.attention_norm(x), self.job.shapes
        q, k, v = self.w_q(nx).reshape(*x.shape[:2], c.heads, c.d_head), self.w_k(nx), self.w_v(nx)
        attended = attend(rotate(q, rope), rotate(k, rope), v, self.job.platform)
        attended = constrained(attended.reshape(*x.shape[:2], c.n_kv, c.n_q_per_kv, c.d_head), HEADS)
        x = constrained(x + self.w_o(attended), BETWEEN)
        nx = self.mlp_norm(x)
        hidden = constrained(nnx.silu(self.w_gate(nx)) * self.w_up(nx), HIDDEN)
        return constrained(x + self.w_down(hidden), BETWEEN)


class Transformer(nnx.Module):
    """The model."""

    def load(self, weights: dict[str, np.ndarray]) -> None:
        """Sets all weights, from those by name, stacked over layers."""
        self.embed.weight.value, self.unembed.weight.value = weights["embed"], weights["unembed"]
        self.final_norm.scale.value = weights["final_norm"]
        for i, layer in enumerate(self.layers):
            for name in ("attention_norm", "mlp_norm"):
                getattr(layer, name).scale.value = weights[name][i]
            for name in SPECS.keys() - {"embed", "unembed"}:
                getattr(layer, name).weight.value = weights[name][i]

    def __init__(self, job: Job, rngs: nnx.Rngs):
        c = job.shapes
        self.job, self.layers = job, nnx.List([Layer(job, rngs) for _ in range(c.layers)])
        self.embed = Matrix(job, "embed", (c.vocab,), (c.d_model,), rngs)
        self.unembed = Matrix(job, "unembed", (c.vocab,), (c.d_model,), rngs)
        self.final_norm = nnx.RMSNorm(c.d_model, epsilon=c.norm_epsilon, dtype=DTYPES[job.dtype], rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        rope = rope_tables(self.job.shapes, ids.shape[1])
        x = constrained(self.embed.used[ids], BETWEEN)
        for layer in self.layers:
            x = layer(x, rope)
        return constrained(jnp.einsum("blm,vm->blv", self.final_norm(x), self.unembed.used), HIDDEN)


def make(job: Job) -> nnx.Optimizer:
    """The model with its optimizer, as (model, optimizer)."""
    model = Transformer(job, nnx.Rngs(job.seed))
    adamw = optax.adamw(job.learning_rate, job.b1, job.b2, job.epsilon, weight_decay=job.weight_decay)
    return model, nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(job.clip_norm), adamw), wrt=nnx.Param)


def training_step(graph: Any, state: Any, ids: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
    """One step: the next state and the loss."""
    model, optimizer = nnx.merge(graph, state)

    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(ids).astype(jnp.float32), targets).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return nnx.state((model, optimizer)), loss


def start(job: Job, mesh: Any) -> tuple[Any, Any, Any, Any]:
    """The modules' graph, the abstract state, its shardings, and the jitted step, which reuses the state's memory."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make(job)))
    places = nnx.get_named_sharding(state, mesh)
    out = places, NamedSharding(mesh, P())
    step = jax.jit(functools.partial(training_step, graph), donate_argnums=0, out_shardings=out)
    return graph, state, places, step


def lowered(job: Job, devices: Any) -> Any:
    """The step for devices that need not be here."""
    mesh = mesh_of(job, devices)
    with jax.set_mesh(mesh):
        _, state, places, step = start(job, mesh)
        state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, places)
        ids = jax.ShapeDtypeStruct((job.sequences, job.length), np.uint32, sharding=NamedSharding(mesh, BY_ROW))
        return step.lower(state, ids, ids)


class Contestant(OnJax):
    """The trainer in Flax NNX."""

    def __init__(self, job: Job, weights: dict[str, np.ndarray] | None = None):
        self.mesh, self.steps = mesh_of(job, jax.devices()[: job.devices]), 0
        with jax.set_mesh(self.mesh):
            *_, places, self.step_of = start(job, self.mesh)
            model, optimizer = make(job)
            if weights is not None:
                model.load(weights)
            self.state = jax.device_put(nnx.state((model, optimizer)), places)
            by_row = NamedSharding(self.mesh, BY_ROW)
            self.batches = [jax.device_put((inputs_of(x), x), by_row) for x in batches(job)]

    def step(self) -> jax.Array:
        """Starts a step. Returns its loss, on the device."""
        with jax.set_mesh(self.mesh):
            self.state, loss = self.step_of(self.state, *self.batches[self.steps % len(self.batches)])
        self.steps += 1
        return loss
