"""A trainer in plain JAX, as in the cookbook of JAX's documentation: dicts, a loop over layers, AdamW by hand.

On several devices: plain data parallelism, sequences sharded over all devices, everything else replicated.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.throughput.peers.job import Job, Shapes, batches, inputs_of

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
WHOLE = ("embed", "final_norm", "unembed")


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


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention; cuDNN's kernel where there is one."""
    fused = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if fused else "xla")


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """RMSNorm over the last dim (arXiv 1910.07467), in f32."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon) * weight).astype(x.dtype)


def logits_of(parameters: dict, ids: jax.Array, c: Shapes, dtype) -> jax.Array:
    """f32 logits [batch, length, vocab]."""
    rope, (b, l) = rope_tables(c, ids.shape[1]), ids.shape
    x = parameters["embed"][ids].astype(dtype)
    for layer in parameters["layers"]:
        w = {name: value if "norm" in name else value.astype(dtype) for name, value in layer.items()}
        nx = rms_norm(x, w["attention_norm"], c.norm_epsilon)
        q = jnp.einsum("blm,mkqd->blkqd", nx, w["w_q"]).reshape(b, l, c.heads, c.d_head)
        k = jnp.einsum("blm,mkd->blkd", nx, w["w_k"])
        v = jnp.einsum("blm,mkd->blkd", nx, w["w_v"])
        attended = attend(rotate(q, rope), rotate(k, rope), v).reshape(b, l, c.n_kv, c.n_q_per_kv, c.d_head)
        x = x + jnp.einsum("blkqd,kqdm->blm", attended, w["w_o"])
        nx = rms_norm(x, w["mlp_norm"], c.norm_epsilon)
        hidden = jax.nn.silu(nx @ w["w_gate"]) * (nx @ w["w_up"])
        x = x + hidden @ w["w_down"]
    nx = rms_norm(x, parameters["final_norm"], c.norm_epsilon)
    unembed = parameters["unembed"].astype(dtype)
    return jnp.einsum("blm,vm->blv", nx, unembed, preferred_element_type=jnp.float32)


def adamw(job: Job, w: jax.Array, g: jax.Array, mu: jax.Array, nu: jax.Array, count: jax.Array):
    """One update (arXiv 1711.05101, algorithm 2), of step `count`, from 1."""
    mu = job.b1 * mu + (1 - job.b1) * g
    nu = job.b2 * nu + (1 - job.b2) * g * g
    unbiased_mu, unbiased_nu = mu / (1 - job.b1**count), nu / (1 - job.b2**count)
    direction = unbiased_mu / (jnp.sqrt(unbiased_nu) + job.epsilon)
    return w - job.learning_rate * (direction + job.weight_decay * w), mu, nu


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
        self.job = job
        devices = jax.devices()[: job.devices]
        mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
        everywhere, by_row = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        self.state = jax.device_put(self.initial(weights), everywhere)
        self.batches = [jax.device_put((inputs_of(x), x), by_row) for x in batches(job)]
        self.jitted = jax.jit(self.training_step, donate_argnums=0, out_shardings=(everywhere, everywhere))
        self.steps = 0

    def initial(self, weights: dict[str, np.ndarray] | None) -> dict:
        """The state before the first step, from these weights or random ones."""
        c = self.job.shapes
        if weights is None:
            parameters = jax.jit(lambda key: initial_parameters(c, key))(jax.random.key(self.job.seed))
        else:
            parameters = jax.tree.map(jnp.asarray, nested(weights, c.layers))
        zeros = lambda: jax.tree.map(jnp.zeros_like, parameters)
        return {"parameters": parameters, "mu": zeros(), "nu": zeros(), "count": jnp.zeros((), jnp.float32)}

    def training_step(self, state: dict, ids: jax.Array, targets: jax.Array) -> tuple[dict, jax.Array]:
        """One step: the next state and the loss."""
        job = self.job

        def loss_of(parameters):
            logits = logits_of(parameters, ids, job.shapes, DTYPES[job.dtype])
            at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - at_target)

        loss, g = jax.value_and_grad(loss_of)(state["parameters"])
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(g)))
        g = jax.tree.map(lambda x: x * (job.clip_norm / jnp.maximum(norm, job.clip_norm)), g)
        count = state["count"] + 1
        update = lambda w, g, mu, nu: adamw(job, w, g, mu, nu, count)
        updated = jax.tree.map(update, state["parameters"], g, state["mu"], state["nu"])
        part = lambda i: jax.tree.map(lambda _, found: found[i], g, updated)
        return {"parameters": part(0), "mu": part(1), "nu": part(2), "count": count}, loss

    def step(self) -> jax.Array:
        """Starts a step. Returns its loss, on the device."""
        self.state, loss = self.jitted(self.state, *self.batches[self.steps % len(self.batches)])
        self.steps += 1
        return loss
