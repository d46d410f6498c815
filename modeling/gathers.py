"""Weights gathered ahead of their use, by the gathers that the model's own parts write."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from modeling.model import LanguageModel, Tokens, blank_inputs, check_logits
from shardlib import gathers
from shardlib.layers import split_extras
from shardlib.op_checks import varying
from shardlib.parsing import PIPELINE_AXIS
from shardlib.values import mesh_axes, pipeline_stage, stage_axes

W = TypeVar("W")


def gather_ahead(model: LanguageModel, w: W, einsum: Callable, length: int, layers: bool) -> W:
    """`w` with the weights outside of the layers gathered and cast, each once for all its uses. Per-device code.

    The gathers are those that `embed`, `layer` and `logits` write, noted while these are traced once. At their uses
    they do nothing then.

    Args:
        w: weights as they are at rest, or copies.
        einsum: as `layer` is given it.
        length: positions of a sequence, for the trace.
        layers: whether the stacks of layers are gathered too.
    """

    def parts(w: Any) -> None:
        # Of one sequence: the gathers of weights do not depend on the batch.
        zeros = varying(jnp.zeros((1, length), jnp.int32), stage_axes())
        tokens = Tokens(jnp.uint32(zeros), zeros, zeros, inputs=blank_inputs(model, zeros)).prepared(model)
        x = model.embed(w, tokens)
        if layers:
            first = jax.tree.map(lambda stack: stack[0], w.layers)
            x, _ = split_extras(model.layer(x, first, tokens, lambda q, *_, **options: q, einsum))
        check_logits(model, model.logits(w, x))

    with pipeline_stage():  # whose devices have different layers
        notes = gathers.note_gathers(parts, w)
    in_layer = lambda path: path.startswith("layers.")
    in_stage = PIPELINE_AXIS in mesh_axes()  # where nothing can be gathered over p
    return gathers.gather_ahead(w, notes, lambda path: layers or not in_layer(path), lambda path: layers or in_stage)
