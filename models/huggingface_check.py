"""Comparison of a run's logits with those of a model's files, which models/huggingface_forward.py computes.

The run's logits come from train.Forward, on one CPU device and in f32, a period of layers at a time. Weights of layers
are read up to GROUP_BYTES at a time, so that memory is bounded for any size of the model. A chunk of a checkpoint that
holds all layers of a weight is read once for each group.
"""

import dataclasses
import functools
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cluster.devices import make_mesh
from input_loader import TokenBatch
from modeling.attention_calls import calls_of
from modeling.model import act, compute_scope, load_model, period_of
from modeling.rules import Rule, causal, same_document
from models.huggingface_forward import FORWARDS
from models.huggingface_tensors import Tensors
from shardlib.layers import LayerNumbers
from shardlib.shardtypes import f32, i32, make_shardings, typed_shard_map
from train import Forward
from training_io.config import TrainingConfig

LENGTH = 32
"""Largest number of tokens in the text that is compared: bos and random ones."""
TOLERANCE = 2**-17
"""Largest difference of two results, divided by the largest entry. The run rounds to f32 after each operation, which
makes 1e-6 in models of 96 layers and at random weights. GELU and its tanh form differ by 2e-5."""
AMPLIFIED = 2**-6
"""Largest difference of logits if each layer alone is within TOLERANCE. Large weights amplify rounding."""
GROUP_BYTES = 2**33
"""Largest size of the layers in memory. One period of layers may be larger."""


def forward_of(c: Any) -> Forward:
    """The run's forward pass in f32 and without approximations."""
    training = TrainingConfig(batch_size=1, seq_len=LENGTH, steps=1, compute_dtype="f32", attention="einsum")
    return Forward(load_model(c), training)


def one_device() -> Any:
    """Context with a mesh of one CPU device."""
    return jax.set_mesh(make_mesh(1, 1, 1, jax.devices("cpu")[:1]))


def check_rules(c: Any, model_type: str) -> None:
    """Raises ValueError if a layer has attention by a rule that models of this type do not have."""
    if model_type not in FORWARDS:
        return
    with one_device():
        calls = calls_of(forward_of(c), LENGTH)
    for call in calls:
        rule, usual = call.rule, call.q.shape[-1] ** -0.5
        plain = set(rule.visible) - {same_document} == {causal} and rule.score is None
        plain &= rule.scale is None or math.isclose(rule.scale, usual, rel_tol=1e-6)
        if not plain or call.sinks is not None:
            raise ValueError(
                f"layer {call.turn} has attention by the rule `{rule}`{' with sinks' * (call.sinks is not None)}; "
                f"{model_type} in transformers has `{Rule()}` only, of scale 1/√d_head: it gives other logits. A "
                "module with functions of its own can exchange such a model as another model_type."
            )


def compare(c: Any, weights: Any, config: dict, directory: Path, dtype: np.dtype | None = None) -> str:
    """Compares the logits of a text. Returns a description of the comparison and of the difference.

    Args:
        c: the run's ModelConfig.
        weights: weights of the run, whose leaves are read when they are indexed.
        config: content of config.json.
        directory: directory of the safetensors.
        dtype: dtype to which the weights were rounded; None: not rounded.

    Raises:
        ValueError: the logits differ by more than TOLERANCE, or are not finite; or the norms have another epsilon.
    """
    kind = config.get("model_type")
    if kind not in FORWARDS:
        return (
            f"nothing: models/huggingface_forward.py has no {kind!r}. Compare the logits of a text with those of "
            "transformers.AutoModelForCausalLM, before you rely on this model."
        )
    theirs = FORWARDS[kind](config, Tensors(directory))
    # Logits rarely show it: 1e-6 beside 1e-5 is less than rounding where activations are large.
    if (epsilon := getattr(c, "norm_epsilon", theirs.epsilon)) != theirs.epsilon:
        raise ValueError(f"the epsilon of the norms is {epsilon} in the run, and {theirs.epsilon} in config.json.")
    length = min(LENGTH, config.get("n_positions") or LENGTH)
    targets = np.random.default_rng(0).integers(0, c.vocab, (1, length)).astype(np.uint32)
    ids = np.concatenate([[c.bos_id], targets[0, :-1]])
    with one_device():
        own = own_values(c, weights, targets, dtype)
    expected = own[-1][1]
    if not np.isfinite(expected).all():
        raise ValueError("the run's own logits are not finite, so its weights are useless. Take another step.")
    far, rounding = distance(theirs(ids), expected), ""
    if not far <= TOLERANCE:
        where = first_difference(theirs, ids, own)
        if where or not far <= AMPLIFIED:
            raise ValueError(
                f"the logits of this {kind} are not the run's own: of {length} tokens, they differ by {far:.2g} of the "
                f"largest. {where or 'Each layer alone agrees: its weights are so large that they amplify rounding.'}"
            )
        rounding = "; each layer alone agrees, and amplifies rounding"
    return f"logits of {length} tokens with the run's own: they differ by at most {far:.1g} of the largest{rounding}"


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, divided by the largest entry of `expected`. Infinite for arrays of different shapes."""
    if found.shape != expected.shape:
        return math.inf
    return float(np.max(np.abs(found - expected)) / max(np.max(np.abs(expected)), 1e-30))


def first_difference(theirs: Any, ids: np.ndarray, own: list[tuple[int, np.ndarray]]) -> str:
    """Description of the first part whose results differ from those of the run; empty if none does."""

    def through(model: Any, start: int, stop: int, x: np.ndarray) -> np.ndarray:
        for i in range(start, stop):
            x = model.layer(i, x)
        return x

    if not distance(theirs.embed(ids), own[0][1]) <= TOLERANCE:
        return "What enters the first layer differs: the embedding."
    for (start, x), (stop, y) in itertools.pairwise(own[:-1]):
        if not distance(through(theirs, start, stop, np.float64(x)), y) <= TOLERANCE:
            name = f"Layer {start}" if stop == start + 1 else f"One of the layers {start} … {stop - 1}"
            for what, other in theirs.variants().items():
                if distance(through(other, start, stop, np.float64(x)), y) <= TOLERANCE:
                    return f"{name} is the first that differs. It agrees with {what}, which the files do not say."
            return f"{name} is the first that differs."
    if not distance(theirs.logits(np.float64(own[-2][1])), own[-1][1]) <= TOLERANCE:
        return "What the layers give agrees; the logits from it do not: the final norm, or the output projection."
    return ""


def own_values(c: Any, weights: Any, targets: np.ndarray, dtype: Any = None) -> list[tuple[int, np.ndarray]]:
    """The run's residual stream [L, M] after each period of layers, and at last its logits [L, V].

    Each with the number of layers before it, from 0 to all of them. On the current mesh.
    """
    forward = forward_of(c)
    model, period = forward.model, period_of(forward.model)
    starts = np.zeros(targets.shape, bool)
    starts[:, 0] = True
    batch = TokenBatch(targets=targets, is_seq_start=starts, loss_mask=~starts)

    @typed_shard_map
    def embed(w: model.Weights, batch: TokenBatch) -> act["B/r/d L/t M"]:
        return model.embed(forward.outside(forward.copies(w)), forward.tokens(batch))

    @typed_shard_map
    def layers(w: model.Weights, batch: TokenBatch, x: act["B/r/d L/t M"], first: i32[""]) -> act["B/r/d L/t M"]:
        numbers = LayerNumbers(first + jnp.arange(period))
        return forward.layers(forward.copies(w).layers, x, forward.tokens(batch), numbers)[0]

    @typed_shard_map
    def logits(w: model.Weights, x: act["B/r/d L/t M"]) -> f32["B/r/d L V/t"]:
        return model.logits(forward.outside(forward.copies(w)), x)

    def read(array: Any, index: Any = ...) -> np.ndarray:
        values = array[index]
        return values if dtype is None else values.astype(dtype).astype(np.float32)

    def placed(kind: Any, tree: Any) -> Any:
        return jax.device_put(tree, make_shardings(kind, like=tree))

    of_layer = 4 * sum(math.prod(array.shape[1:]) for array in jax.tree.leaves(weights.layers))
    group = max(1, GROUP_BYTES // (of_layer * period)) * period
    rest = dataclasses.replace(weights, layers=jax.tree.map(lambda array: array[:period], weights.layers))
    w, batch = placed(model.Weights, jax.tree.map(read, rest)), placed(TokenBatch, batch)
    embed, layers, logits = jax.jit(embed), jax.jit(layers), jax.jit(logits)
    with compute_scope("f32"):
        x = embed(w, batch)
        found = [(0, np.asarray(x)[0])]
        for start in range(0, c.layers, group):
            stop = min(start + group, c.layers)
            group_weights = jax.tree.map(functools.partial(read, index=slice(start, stop)), weights.layers)
            for i in range(start, stop, period):
                rows = slice(i - start, i - start + period)
                of_period = jax.tree.map(lambda stack, rows=rows: stack[rows], group_weights)
                w = placed(model.Weights, dataclasses.replace(w, layers=of_period))
                x = layers(w, batch, x, np.int32(i))
                found.append((i + period, np.asarray(x)[0]))
        return [*found, (c.layers, np.asarray(logits(w, x))[0])]
