"""Settings of the optimizer and of the learning rate."""

import dataclasses
import math
from typing import Any

from shardwright.data.checks import (
    CHANGING,
    above_0,
    at_least_0,
    at_least_1,
    check_choice,
    check_ranges,
    one_of,
    setting,
    within,
)
from shardwright.modeling.weights import KINDS


@dataclasses.dataclass
class GroupConfig:
    """Weights, selected by name, that are updated differently from the rest.

    Null fields: as for the rest.
    """

    match: str
    """Pattern of names, such as layers.w_*, embed or *norm*, with the wildcards * ? [ ] of a
    shell."""
    rate: float | None = at_least_0(None)
    """Factor on the learning rate."""
    weight_decay: float | None = at_least_0(None)
    """Replaces optimizer.weight_decay, for every kind of weight."""
    algorithm: str | None = None
    """Replaces optimizer.algorithm. frozen: the weights are not updated, and do not count in
    grad_norm."""


@dataclasses.dataclass
class OptimizerConfig:
    """Settings of the optimizer."""

    learning_rate: float = at_least_0(dataclasses.MISSING, CHANGING)
    """Peak learning rate, reached at the end of the warmup."""
    warmup_steps: int = within(0, 2**31, dataclasses.MISSING, CHANGING)
    """Steps of linear warmup, at least 0. With a warmup, step 0 has learning rate 0."""
    schedule_steps: int | None = at_least_1(None, CHANGING)
    """Step at which the learning rate reaches its floor; above warmup_steps. Null for
    schedule=constant, which has no floor."""
    schedule: str = setting(CHANGING, default="cosine")
    """After the warmup. cosine: half a cosine down to the floor (arXiv 1608.03983). linear: a line
    down to it. wsd: the peak, then a line down to the floor in the last cooldown_steps (arXiv
    2405.18392). constant: the peak. Or module:function of your own, which has the warmup too
    (docs/changing.md)."""
    cooldown_steps: int | None = at_least_1(None, CHANGING)
    """wsd: number of steps of the decay, which ends at schedule_steps; at least 1."""
    final_fraction: float = within(0, math.nextafter(1, 2), 0.1, CHANGING)
    """The floor of the decay as a fraction of the peak, in [0, 1]."""
    algorithm: str = "adamw"
    """adamw: all weights (arXiv 1711.05101). muon: matrices by Muon (arXiv 2502.16982), all other
    weights by AdamW. Or another name of train.OPTIMIZERS, or module:function of your own
    (docs/changing.md)."""
    parametrization: str = one_of(("standard", "mup", "completep"), default="standard")
    """How initial values, learning rates, Adam's epsilon and weight decay depend on the model's
    size (docs/ladder.md). standard: they don't. mup: these settings were tuned for the width of
    `base` (arXiv 2203.03466). completep: for its width and number of layers (arXiv 2505.01618)."""
    base: Any = None
    """Sizes of the model for which these settings were tuned, where they differ from this one's:
    {d_model: 64, n_kv: 2, d_ff: 176}."""
    adam_b1: float = within(0, 1, 0.9)
    adam_b2: float = within(0, 1, 0.95)
    adam_epsilon: float = within(1e-30, math.inf, 1e-8)
    """Added to the root of the second moment, which is 0 for an entry that never had a gradient: at
    least 1e-30."""
    weight_decay: float = at_least_0(0.1, CHANGING)
    """Decoupled weight decay (arXiv 1711.05101), multiplied by the learning rate."""
    decay_schedule: str | None = setting(CHANGING, default=None)
    """module:function of your own that gives a factor on all weight decays at a step
    (docs/changing.md). Null: 1."""
    decay_on: list[str] = dataclasses.field(default_factory=lambda: list(KINDS))
    """The kinds of weights that decay: matrix, embedding, unembedding (also tied tables), vector
    (norms, biases)."""
    groups: list[GroupConfig] = dataclasses.field(default_factory=list)
    """Groups of weights that are updated differently. If two groups match a weight, the later one
    wins."""
    muon_momentum: float = within(0, 1, 0.95)
    """Nesterov momentum of the gradients of matrices, in [0, 1)."""
    muon_iterations: int = within(1, 101, 5)
    """Number of Newton-Schulz iterations that orthogonalize an update, in [1, 100]."""
    muon_rms: float = above_0(0.2)
    """Root mean square of the entries of a matrix's update, before the learning rate. 0.2 is about
    that of AdamW, so that AdamW's learning rates fit (arXiv 2502.16982, section 2.2)."""
    clip_norm: float = above_0(1.0, CHANGING)
    """Gradients of a larger global norm are scaled down to it."""
    loss: str = "cross_entropy"
    """What training minimizes: cross_entropy, or module:function of your own (docs/changing.md)."""
    z_loss: float = at_least_0(0.0, CHANGING)
    """Factor on the squared log of the softmax normalizer (arXiv 2204.02311, section 5); 0 turns it
    off."""


def check_optimizer(c: OptimizerConfig) -> None:
    """Raises ValueError for a setting that is not allowed, or contradicts another one."""
    is_own = ":" in c.schedule
    if c.decay_schedule is not None and ":" not in c.decay_schedule:
        raise ValueError(
            f"optimizer.decay_schedule is {c.decay_schedule!r}; give module:function, such as "
            "my_file:my_decay."
        )
    if not is_own:
        check_choice("optimizer.schedule", c.schedule, ("cosine", "linear", "wsd", "constant"))
    if c.parametrization != "standard" and not c.base:
        raise ValueError(
            f"optimizer.parametrization is {c.parametrization} without optimizer.base; give the "
            "sizes for which the "
            "settings were tuned: 'optimizer.base={d_model: 64}'."
        )
    for kind in c.decay_on:
        check_choice("optimizer.decay_on", kind, KINDS)
    for i, group in enumerate(c.groups):
        check_ranges(f"optimizer.groups[{i}]", group)
    needed = {"schedule_steps": c.schedule != "constant", "cooldown_steps": c.schedule == "wsd"}
    needed = {} if is_own else needed  # which may read them or not
    for name, wanted in needed.items():
        if wanted != (getattr(c, name) is not None):
            raise ValueError(
                f"optimizer.schedule is {c.schedule} and optimizer.{name} {getattr(c, name)}; "
                + (f"give {name}." if wanted else "leave it null.")
            )
    decay_steps = 1 if c.cooldown_steps is None else c.cooldown_steps
    if c.schedule_steps is not None and c.warmup_steps > c.schedule_steps - decay_steps:
        cooldown = f", cooldown_steps {c.cooldown_steps}" if c.cooldown_steps else ""
        raise ValueError(
            f"optimizer.warmup_steps is {c.warmup_steps} and optimizer.schedule_steps "
            f"{c.schedule_steps}{cooldown}; the warmup must end before the decay begins."
        )
