"""The learning rate of each step."""

import jax.numpy as jnp

from optimizers.config import OptimizerConfig
from shardlib.shardtypes import f32, i32


def learning_rate(step: i32[""], c: OptimizerConfig) -> f32[""]:
    """Linear warmup to the peak at warmup_steps, then the decay of c.schedule to its floor at schedule_steps."""
    step, end = jnp.float32(step), c.schedule_steps
    peak_left = 1.0
    if c.schedule != "constant":
        begin = end - c.cooldown_steps if c.schedule == "wsd" else c.warmup_steps
        progress = jnp.clip((step - begin) / (end - begin), 0, 1)
        peak_left = 0.5 * (1 + jnp.cos(jnp.pi * progress)) if c.schedule == "cosine" else 1 - progress
    decay = c.final_fraction + (1 - c.final_fraction) * peak_left
    return c.learning_rate * jnp.where(step < c.warmup_steps, step / max(c.warmup_steps, 1), decay)
