"""Weights gathered ahead of their use, by the gathers in the model's own code."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from modeling.model import LanguageModel, blank_tokens, check_logits
from shardlib import gathers, shardops
from shardlib.layers import split_extras
from shardlib.values import pipeline_stage, planned_devices, stage_axes, varying

W = TypeVar("W")


def once(setting: str) -> bool:
    """Whether weights are gathered once a step on the current mesh, by training.gather_weights.

    `auto` means that they are where d is 1. Nothing is gathered there, but each weight is cast once, which the backward
    pass would do again.
    """
    return setting == "step" or (setting == "auto" and planned_devices(("d",)) == 1)


def gather_ahead(model: LanguageModel, w: W, einsum: Callable, length: int, layers: bool) -> W:
    """Gathers and casts the weights outside of the layers, each once for all its uses. Per-device code.

    The gathers are those in `embed`, `layer` and `logits`, which are traced once to find them. If a weight is gathered
    here, the gather where it is used does nothing.

    Args:
        model: the model.
        w: weights at rest, or copies of them.
        einsum: the argument of `layer`.
        length: positions of a sequence, for the trace.
        layers: whether the stacks of layers are gathered too.
    """

    def parts(w: Any) -> None:
        tokens = blank_tokens(model, length)
        x = varying(model.embed(w, tokens), stage_axes())
        if layers:
            w_layer = jax.tree.map(lambda stack: stack[0], w.layers)
            x, _ = split_extras(model.layer(x, w_layer, tokens, lambda q, *_, **options: q, einsum))
        check_logits(model, model.logits(w, x))

    with pipeline_stage(alone=False):  # devices of p have different layers
        notes = gathers.note_gathers(parts, w)
    in_layer = lambda path: path.startswith("layers.")
    needed = lambda _: layers and shardops.axis_size("d") > 1
    return gathers.gather_as_noted(w, notes, lambda path: layers or not in_layer(path), needed)
