"""A trainer in plain JAX, as in the cookbook of JAX's documentation: dicts, a loop over layers, AdamW by hand.

XLA chooses the collectives (GSPMD). Weights and optimizer state are sharded over d and t, sequences over r and d, and
what is between the layers over t too, by the shardings of the arguments and by constraints, each as ours shards them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.throughput.peers.job import Job, Shapes, batches, inputs_of
from jax_extra import KEPT, save_for_backward

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
WHOLE = ("embed", "final_norm", "unembed")
SPECS = {
    "embed": P("t", "d"),
    "unembed": P("t", "d"),
    "w_q": P("d", "t"),
    "w_k": P("d", "t"),
    "w_v": P("d", "t"),
    "w_o": P("t", None, None, "d"),
    "w_gate": P("d", "t"),
    "w_up": P("d", "t"),
    "w_down": P("t", "d"),
}
"""Sharding of the matrices of a layer, and of the others. Norms are on all devices."""
BETWEEN, HEADS, HIDDEN = P(("r", "d"), "t"), P(("r", "d"), None, "t"), P(("r", "d"), None, "t")
BY_ROW = P(("r", "d"))
"""Shardings within the model, whose first dims are sequences and positions."""


def nested(weights: dict, layers: int) -> dict:
    """Weights by name, stacked over layers, as a dict with a list of one dict a layer."""
    of_layer = lambda i: {name: x[i] for name, x in weights.items() if name not in WHOLE}
    return {name: weights[name] for name in WHOLE} | {"layers": [of_layer(i) for i in range(layers)]}


def initial_parameters(c: Shapes, key: jax.Array) -> dict:
    """Random weights; norms are 1."""

    def draw(name, shape, key):
        if "norm" in name:
            return jnp.ones(shape, jnp.float32)
        return jax.random.normal(key, shape, jnp.float32) * c.d_model**-0.5

    shapes = c.weights()
    keys = jax.random.split(key, len(shapes))
    return nested({name: draw(name, shape, k) for (name, shape), k in zip(shapes.items(), keys, strict=True)}, c.layers)


def rope_tables(c: Shapes, length: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, [length, 1, d_head / 2], of the angles by which pairs turn (arXiv 2104.09864)."""
    frequencies = c.rope_base ** (-np.arange(0, c.d_head, 2) / c.d_head)
    angles = jnp.asarray((np.arange(length)[:, None, None] * frequencies).astype(np.float32))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """RoPE on x[batch, length, heads, d_head], by halves, in f32."""
    (cos, sin), (a, b) = rope, jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, platform: str) -> jax.Array:
    """Causal attention of each device's own heads; by a fused kernel where there is one."""
    fused = "cudnn" if platform == "gpu" and q.dtype == jnp.bfloat16 else "xla"
    attention = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=fused)
    attention = splash if platform == "tpu" else attention
    return jax.shard_map(attention, in_specs=(HEADS, HEADS, HEADS), out_specs=HEADS, check_vma=False)(q, k, v)


def splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention by JAX's kernel for TPUs, for as many heads of queries as of keys."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q.shape[1:3]
    mask, block = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads), min(length, 1024)
    sizes = kernels.BlockSizes(block, block, block // 2, block, block, block // 2, block, block)
    kernel = jax.vmap(kernels.make_splash_mha_single_device(mask, block_sizes=sizes))
    heads_first = (x.swapaxes(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    return kernel(*heads_first).swapaxes(1, 2)


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """RMSNorm over the last dim (arXiv 1910.07467), in f32."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon) * weight).astype(x.dtype)


def run_layer(job: Job, rope: tuple[jax.Array, jax.Array], x: jax.Array, layer: dict) -> jax.Array:
    """The residual stream after a layer. What ours marks is marked here too."""
    c, dtype, (b, l) = job.shapes, DTYPES[job.dtype], x.shape[:2]
    constrained = jax.lax.with_sharding_constraint
    w = {name: value if "norm" in name else value.astype(dtype) for name, value in layer.items()}
    nx = rms_norm(x, w["attention_norm"], c.norm_epsilon)
    q = jnp.einsum("blm,mkqd->blkqd", nx, w["w_q"]).reshape(b, l, c.heads, c.d_head)
    k = jnp.einsum("blm,mkd->blkd", nx, w["w_k"])
    v = save_for_backward(jnp.einsum("blm,mkd->blkd", nx, w["w_v"]))
    q, k = save_for_backward((rotate(q, rope), rotate(k, rope)))
    attended = save_for_backward(attend(q, k, v, job.platform))
    attended = attended.reshape(b, l, c.n_kv, c.n_q_per_kv, c.d_head)
    x = save_for_backward(constrained(x + jnp.einsum("blkqd,kqdm->blm", attended, w["w_o"]), BETWEEN))
    nx = rms_norm(x, w["mlp_norm"], c.norm_epsilon)
    gate, up = save_for_backward((nx @ w["w_gate"], nx @ w["w_up"]))
    hidden = constrained(jax.nn.silu(gate) * up, HIDDEN)
    return constrained(x + hidden @ w["w_down"], BETWEEN)


def logits_of(parameters: dict, ids: jax.Array, job: Job) -> jax.Array:
    """Logits [batch, length, vocab], as ours in the dtype of the products."""
    c, dtype, rope = job.shapes, DTYPES[job.dtype], rope_tables(job.shapes, ids.shape[1])
    constrained = jax.lax.with_sharding_constraint
    # Without this constraint XLA reshards the rows by way of whole arrays where r and d are used.
    embed = constrained(parameters["embed"].astype(dtype), P("t"))
    x = constrained(embed[ids], BETWEEN)
    run = functools.partial(run_layer, job, rope)
    run = jax.checkpoint(run, policy=KEPT["marked"]) if job.save == "marked" else run
    for layer in parameters["layers"]:
        x = run(x, layer)
    nx = rms_norm(x, parameters["final_norm"], c.norm_epsilon)
    return constrained(jnp.einsum("blm,vm->blv", nx, parameters["unembed"].astype(dtype)), HIDDEN)


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


def initial_state(job: Job, parameters: dict) -> dict:
    """The state before the first step."""
    zeros = lambda: jax.tree.map(jnp.zeros_like, parameters)
    return {"parameters": parameters, "mu": zeros(), "nu": zeros(), "count": jnp.zeros((), jnp.float32)}


def training_step(job: Job, state: dict, ids: jax.Array, targets: jax.Array) -> tuple[dict, jax.Array]:
    """One step: the next state and the loss."""
    loss, g = jax.value_and_grad(loss_of)(state["parameters"], ids, targets, job)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(g)))
    g = jax.tree.map(lambda x: x * (job.clip_norm / jnp.maximum(norm, job.clip_norm)), g)
    count = state["count"] + 1
    update = lambda w, g, mu, nu: adamw(job, w, g, mu, nu, count)
    updated = jax.tree.map(update, state["parameters"], g, state["mu"], state["nu"])
    part = lambda i: jax.tree.map(lambda _, found: found[i], g, updated)
    return {"parameters": part(0), "mu": part(1), "nu": part(2), "count": count}, loss


def shardings(state: dict, mesh: Any) -> dict:
    """Sharding of each array of the state, by the name of its weight."""
    return jax.tree_util.tree_map_with_path(lambda path, _: NamedSharding(mesh, SPECS.get(path[-1].key, P())), state)


def mesh_of(job: Job, devices: Any) -> Any:
    """The mesh of a job, over which XLA shards by itself."""
    sizes = job.r, job.d, job.t
    return jax.make_mesh(sizes, ("r", "d", "t"), axis_types=(AxisType.Auto,) * 3, devices=devices)


def jitted(job: Job, mesh: Any, state: dict) -> Any:
    """The jitted step, which reuses the memory of the state."""
    out = shardings(state, mesh), NamedSharding(mesh, P())
    return jax.jit(functools.partial(training_step, job), donate_argnums=0, out_shardings=out)


def lowered(job: Job, devices: Any) -> Any:
    """The step for devices that need not be here."""
    mesh = mesh_of(job, devices)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(lambda: initial_state(job, initial_parameters(job.shapes, jax.random.key(0))))
        arrays = jax.tree.map(lambda x, s: x.update(sharding=s), state, shardings(state, mesh))
        ids = jax.ShapeDtypeStruct((job.sequences, job.length), np.uint32, sharding=NamedSharding(mesh, BY_ROW))
        return jitted(job, mesh, state).lower(arrays, ids, ids)


class OnJax:
    """A contestant on JAX's devices."""

    def wait(self, losses: list[jax.Array]) -> list[float]:
        """Waits for the steps that returned these losses."""
        return [float(loss) for loss in jax.device_get(losses)]

    def device_peak(self) -> int | None:
        """Peak bytes of the first device, if it counts them."""
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


class Contestant(OnJax):
    """The trainer in plain JAX."""

    def __init__(self, job: Job, weights: dict[str, np.ndarray] | None = None):
        self.mesh = mesh_of(job, jax.devices()[: job.devices])
        with jax.set_mesh(self.mesh):
            c, key = job.shapes, jax.random.key(job.seed)
            parameters = jax.jit(lambda: initial_parameters(c, key))() if weights is None else nested(weights, c.layers)
            state = initial_state(job, jax.tree.map(jnp.asarray, parameters))
            self.state = jax.device_put(state, shardings(state, self.mesh))
            by_row = NamedSharding(self.mesh, BY_ROW)
            self.batches = [jax.device_put((inputs_of(x), x), by_row) for x in batches(job)]
            self.jitted = jitted(job, self.mesh, state)
        self.steps = 0

    def step(self) -> jax.Array:
        """Starts a step. Returns its loss, on the device."""
        with jax.set_mesh(self.mesh):
            self.state, loss = self.jitted(self.state, *self.batches[self.steps % len(self.batches)])
        self.steps += 1
        return loss
