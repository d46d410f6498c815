"""Prints the scales of weights: what optimizer.parametrization makes of each."""

import jax
from rich.console import Console

from shardwright.modeling.model import load_model
from shardwright.optimizers.rates import updates_of
from shardwright.optimizers.scales import initial_table
from shardwright.program.config import Config
from shardwright.program.spec import load_spec
from shardwright.tools.report.screen import print_table


def show_scales(c: Config, _: object = None) -> None:
    """Prints how each weight begins and learns."""
    model = load_model(c.model)
    begin = initial_table(c.optimizer, model)
    updates = updates_of(c.optimizer, model, load_spec().optimizers)
    rows = []
    for (path, w), u in zip(
        jax.tree_util.tree_flatten_with_path(begin)[0], jax.tree.leaves(updates), strict=True
    ):
        numbers = (f"{x:.4g}" for x in (w.mean, w.std, u.rate, u.epsilon, u.decay))
        rows.append((jax.tree_util.keystr(path, simple=True, separator="."), *numbers, u.algorithm))
    print_table(Console(), ["weight", "mean", "std", "rate", "epsilon", "decay", "update"], rows)
