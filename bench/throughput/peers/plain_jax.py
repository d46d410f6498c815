"""A trainer in plain JAX, as in the cookbook of JAX's documentation: dicts, a loop over layers,
AdamW by hand.

XLA chooses the collectives (GSPMD). Weights and optimizer state are sharded over d and t, sequences
over r and d, and what is between the layers over t too, by the shardings of the arguments and by
constraints, each as ours shards them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.throughput.peers.job import Job, Shapes, Trainer, batches, inputs_of
from shardwright.jax_extra import KEPT, save_for_backward

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
WHOLE = ("embed", "final_norm", "unembed")
_IN, _OUT = P("d", "t"), P("t", "d")
SPECS = {
    "embed": _OUT,
    "unembed": _OUT,
    "w_q": _IN,
    "w_k": _IN,
    "w_v": _IN,
    "w_o": P("t", None, None, "d"),
}
SPECS |= {"w_gate": _IN, "w_up": _IN, "w_down": _OUT}
"""Sharding of the matrices of a layer, and of the others. Norms are on all devices."""
BY_ROW, BETWEEN, WITHIN = P(("r", "d")), P(("r", "d"), "t"), P(("r", "d"), None, "t")
"""Shardings of batches, between layers and within them; the first dims are sequences and
positions."""
constrained = jax.lax.with_sharding_constraint


def nested(weights: dict, layers: int) -> dict:
    """Weights by name, stacked over layers, as a dict with a list of one dict a layer."""
    stacked = {name: x for name, x in weights.items() if name not in WHOLE}
    of_layers = [{name: x[i] for name, x in stacked.items()} for i in range(layers)]
    return {name: weights[name] for name in WHOLE} | {"layers": of_layers}


def rope_tables(c: Shapes, length: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, [length, 1, d_head / 2], of the angles by which pairs turn (arXiv
    2104.09864).
    """
    frequencies = c.rope_base ** (-np.arange(0, c.d_head, 2) / c.d_head)
    angles = jnp.asarray((np.arange(length)[:, None, None] * frequencies).astype(np.float32))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """RoPE on x[batch, length, heads, d_head], by halves, in f32."""
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, platform: str) -> jax.Array:
    """Causal attention of each device's own heads; by a fused kernel where there is one."""
    fused = "cudnn" if platform == "gpu" and q.dtype == jnp.bfloat16 else "xla"
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=fused
    )
    return jax.shard_map(
        attention, in_specs=(WITHIN, WITHIN, WITHIN), out_specs=WITHIN, check_vma=False
    )(q, k, v)


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """RMSNorm over the last dim (arXiv 1910.07467), in f32."""
    x32 = x.astype(jnp.float32)
    return (
        x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon) * weight
    ).astype(x.dtype)


def run_layer(job: Job, rope: tuple[jax.Array, jax.Array], x: jax.Array, layer: dict) -> jax.Array:
    """The residual stream after a layer. What ours marks is marked here too."""
    c = job.shapes
    dtype = DTYPES[job.dtype]
    b, l = x.shape[:2]
    w = {name: value if "norm" in name else value.astype(dtype) for name, value in layer.items()}
    nx = rms_norm(x, w["attention_norm"], c.norm_epsilon)
    q = jnp.einsum("blm,mkqd->blkqd", nx, w["w_q"]).reshape(b, l, c.heads, c.d_head)
    k = jnp.einsum("blm,mkd->blkd", nx, w["w_k"])
    v = save_for_backward(jnp.einsum("blm,mkd->blkd", nx, w["w_v"]))
    q, k = save_for_backward((rotate(q, rope), rotate(k, rope)))
    attended = save_for_backward(attend(q, k, v, job.platform))
    attended = attended.reshape(b, l, c.n_kv, c.n_q_per_kv, c.d_head)
    x = save_for_backward(
        constrained(x + jnp.einsum("blkqd,kqdm->blm", attended, w["w_o"]), BETWEEN)
    )
    nx = rms_norm(x, w["mlp_norm"], c.norm_epsilon)
    gate, up = save_for_backward((nx @ w["w_gate"], nx @ w["w_up"]))
    hidden = constrained(jax.nn.silu(gate) * up, WITHIN)
    return constrained(x + hidden @ w["w_down"], BETWEEN)


def logits_of(parameters: dict, ids: jax.Array, job: Job) -> jax.Array:
    """Logits [batch, length, vocab], as ours in the dtype of the products."""
    c = job.shapes
    dtype = DTYPES[job.dtype]
    rope = rope_tables(job.shapes, ids.shape[1])
    # Without this constraint XLA reshards the rows by way of whole arrays where r and d are used.
    embed = constrained(parameters["embed"].astype(dtype), P("t"))
    x = constrained(embed[ids], BETWEEN)
    run = functools.partial(run_layer, job, rope)
    run = jax.checkpoint(run, policy=KEPT["marked"]) if job.save == "marked" else run
    for layer in parameters["layers"]:
        x = run(x, layer)
    nx = rms_norm(x, parameters["final_norm"], c.norm_epsilon)
    return constrained(jnp.einsum("blm,vm->blv", nx, parameters["unembed"].astype(dtype)), WITHIN)


def adamw(job: Job, w: jax.Array, g: jax.Array, mu: jax.Array, nu: jax.Array, count: jax.Array):
    """One update (arXiv 1711.05101, algorithm 2), of step `count`, from 1."""
    mu = job.b1 * mu + (1 - job.b1) * g
    nu = job.b2 * nu + (1 - job.b2) * g * g
    unbiased_mu, unbiased_nu = mu / (1 - job.b1**count), nu / (1 - job.b2**count)
    direction = unbiased_mu / (jnp.sqrt(unbiased_nu) + job.epsilon)
    return w - job.learning_rate * (direction + job.weight_decay * w), mu, nu


def loss_of(parameters: dict, ids: jax.Array, targets: jax.Array, job: Job) -> jax.Array:
    """Mean loss in nats a token."""
    logits = logits_of(parameters, ids, job).astype(jnp.float32)
    # Not by take_along_axis, whose gradient is a scatter into an array of the size of the logits.
    is_target = jnp.arange(job.shapes.vocab) == targets[..., None]
    at_target = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - at_target)


def mesh_of(job: Job, devices: Any) -> jax.sharding.Mesh:
    """The mesh of a job, over which XLA shards by itself."""
    return jax.make_mesh(
        (job.r, job.d, job.t), ("r", "d", "t"), axis_types=(AxisType.Auto,) * 3, devices=devices
    )


class OnJax(Trainer):
    """A contestant on the JAX devices of `mesh`."""

    mesh: jax.sharding.Mesh

    def step(self) -> jax.Array:
        with jax.set_mesh(self.mesh):
            return super().step()

    def peak(self) -> int:
        """Of the first device, if it counts them."""
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use") or super().peak()


class Sharded(OnJax):
    """A trainer that XLA shards, on devices that may only be compiled for: then it gets no weights.

    It has `initial(weights)`, the state before the first step; `shardings(state)`; and
    `training_step(state, ids, targets)`, the next state and the loss.
    """

    initial: Callable[[Any], Any]
    shardings: Callable[[Any], Any]
    training_step: Callable[..., Any]

    def __init__(self, job: Job, weights: dict[str, np.ndarray] | None = None, devices: Any = None):
        self.job = job
        self.mesh = mesh_of(job, jax.devices()[: job.devices] if devices is None else devices)
        shapes = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32)
            for name, shape in job.shapes.weights().items()
        }
        with jax.set_mesh(self.mesh):
            abstract = jax.eval_shape(self.initial, shapes)
            by_row = NamedSharding(self.mesh, BY_ROW)
            out = self.shardings(abstract)
            self.abstract = jax.tree.map(lambda x, s: x.update(sharding=s), abstract, out)
            self.ids = jax.ShapeDtypeStruct((job.sequences, job.length), np.uint32, sharding=by_row)
            # It reuses the memory of the state.
            out_shardings = out, NamedSharding(self.mesh, P())
            self.jitted = jax.jit(self.training_step, donate_argnums=0, out_shardings=out_shardings)
            if weights is not None:
                self.state = jax.jit(self.initial, out_shardings=out)(weights)
                self.batches = [jax.device_put((inputs_of(x), x), by_row) for x in batches(job)]

    @classmethod
    def lowered(cls, job: Job, devices: Any) -> jax.stages.Lowered:
        """The step for devices that need not be here."""
        trainer = cls(job, devices=devices)
        with jax.set_mesh(trainer.mesh):
            return trainer.jitted.lower(trainer.abstract, trainer.ids, trainer.ids)

    def run(self, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        self.state, loss = self.jitted(self.state, *batch)
        return loss


class Contestant(Sharded):
    """The trainer in plain JAX."""

    def initial(self, weights: dict[str, jax.Array]) -> dict:
        parameters = nested(weights, self.job.shapes.layers)
        mu, nu = (jax.tree.map(jnp.zeros_like, parameters) for _ in range(2))
        return {"parameters": parameters, "mu": mu, "nu": nu, "count": jnp.zeros((), jnp.float32)}

    def shardings(self, state: dict) -> dict:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: NamedSharding(self.mesh, SPECS.get(path[-1].key, P())), state
        )

    def training_step(
        self, state: dict, ids: jax.Array, targets: jax.Array
    ) -> tuple[dict, jax.Array]:
        job = self.job
        loss, g = jax.value_and_grad(loss_of)(state["parameters"], ids, targets, job)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(g)))
        g = jax.tree.map(lambda x: x * (job.clip_norm / jnp.maximum(norm, job.clip_norm)), g)
        count = state["count"] + 1
        update = functools.partial(adamw, job, count=count)
        updated = jax.tree.map(update, state["parameters"], g, state["mu"], state["nu"])
        parameters, mu, nu = (
            jax.tree.map(lambda _, found, i=i: found[i], g, updated) for i in range(3)
        )
        return {"parameters": parameters, "mu": mu, "nu": nu, "count": count}, loss
