"""A trainer in plain JAX, as in the cookbook of JAX's documentation: dicts, a loop over layers, AdamW by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from bench.throughput.peers.jax_peer import DTYPES, JaxPeer, attend, rope_tables, rotate
from bench.throughput.peers.job import Job, Shapes

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
    return w - job.learning_rate * (unbiased_mu / (jnp.sqrt(unbiased_nu) + job.epsilon) + job.weight_decay * w), mu, nu


class Contestant(JaxPeer):
    """The trainer in plain JAX."""

    def initial(self, job: Job, weights: dict[str, np.ndarray] | None) -> dict:
        """The state before the first step, from these weights or random ones."""
        if weights is None:
            parameters = jax.jit(lambda key: initial_parameters(job.shapes, key))(jax.random.key(job.seed))
        else:
            parameters = jax.tree.map(jnp.asarray, nested(weights, job.shapes.layers))
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
