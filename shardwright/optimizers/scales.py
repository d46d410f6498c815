"""muP and CompleteP: how each weight begins and learns, by its kind and its size relative to a base
model.

The base has the sizes in `optimizer.base`. A weight with `inputs` times its fan-in and `outputs`
times its fan-out has 1/√inputs of its initial std (1/inputs if its fan-out is that of the base,
such as the output projection's), 1/inputs of the learning rate, 1/outputs of Adam's epsilon, and
the weight decay divided by its rate: table 3 of arXiv 2203.03466 (Tensor Programs V). An embedding,
a gain and a bias have one input. Muon's rate keeps the spectral norm of an update in proportion to
√(fan-out / fan-in), as arXiv 2310.17813 asks; its factor √longer side is divided out.

Multipliers act on three values of the forward pass. They are folded into weights, so that no model
has to apply them: the scores of attention (1/d_head in place of 1/√d_head), the output of a
residual branch (1/depth, arXiv 2505.01618 with α = 1), and the logits of a tied table (1/width,
table 8). With W' = aW in place of W and a multiplier a, the model computes the same. The gradient
of W' is 1/a of that of W, which Adam, Muon and other optimizers divide out, so W' moves as W does
if its rate is a times as large, its epsilon 1/a, and its decay 1/a. Checkpoints and exports hold
W'.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax

from shardlib.array_types import arrays_in
from shardwright.modeling.model import LanguageModel
from shardwright.modeling.weights import Weight, count_layers, is_in_stack
from shardwright.optimizers.config import OptimizerConfig

CARRIERS = {
    "scores": [[("q_norm",), ("q_norm_all",), ("w_q", "b_q"), ("w_q_heads",)]],
    "residual": [
        [("attention_out_norm",), ("w_o", "b_o")],
        [("mlp_out_norm",), ("w_down", "b_down", "shared_down")],
    ],
    "logits": [[("final_norm",), ("final_gain", "final_bias")]],
}
"""Weights into which each multiplier is folded, by the names that train.py and shardwright/models
use. For each value that it multiplies, the first alternative that the model has.
`Model.multipliers` names those of another model."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How a weight begins and learns.

    `inputs`, `outputs`, `longer` and `depth` (layers) are relative to the base.
    """

    std: float
    mean: float
    inputs: float
    outputs: float
    longer: float
    depth: float
    multiplier: float
    """Product of the multipliers that are folded into the weight."""

    def rate(self, algorithm: str) -> float:
        """Factor on the learning rate.

        Weight decay is divided by it, so that their product stays that of the base.
        """
        width = (
            math.sqrt(self.outputs / self.inputs / self.longer)
            if algorithm == "muon"
            else 1 / self.inputs
        )
        return self.multiplier * width

    @property
    def epsilon(self) -> float:
        """Factor on Adam's epsilon: that by which gradients are smaller than those of the base."""
        return 1 / (self.outputs * self.multiplier * self.depth)


def scales_of(c: OptimizerConfig, model: LanguageModel) -> Any:
    """The Scale of each weight, in a tree like the model's table.

    Raises:
        ValueError: the base has other weights, or a multiplier cannot be folded into weights of the
            model.
    """
    base = model  # of optimizer.parametrization=standard
    if c.parametrization != "standard":
        sizes = (
            c.base
            if c.parametrization == "completep"
            else {**c.base, "layers": model.config.layers}
        )
        kind: Any = type(model)
        base = kind(dataclasses.replace(model.config, **sizes))
        # Of shardwright/models/family.py.
        for setting in ("norm_offset", "embedding_scaled", "attention_scalar"):
            if getattr(model.config, setting, None):
                raise ValueError(
                    f"model.{setting} multiplies by what no weight holds; leave it out for muP."
                )
    table = model.table
    structure = jax.tree.structure(model.table)
    if jax.tree.structure(base.table) != structure:
        raise ValueError(
            "optimizer.base changes which weights the model has; give only its sizes, such as "
            "d_model."
        )
    leaves = jax.tree.leaves(base.table)
    arrays = [
        (path.removeprefix("."), t.spec.dims, weight)
        for path, t, weight in arrays_in(type(table), table)
    ]
    embeddings = {dims[0].name for _, dims, weight in arrays if weight.kind == "embedding"}

    def is_tied(dims: Any, weight: Weight) -> bool:
        return weight.kind == "unembedding" and dims[0].name not in embeddings

    pairs = zip(arrays, leaves, strict=True)
    tied = [there.shape[-1] / w.shape[-1] for (_, dims, w), there in pairs if is_tied(dims, w)]
    depth = count_layers(table) / count_layers(base.table)
    wanted = {
        "scores": math.sqrt(base.config.d_head / model.config.d_head),
        "residual": 1 / depth,
        "logits": math.prod(tied),
    }
    multipliers = dict.fromkeys((path for path, *_ in arrays), 1.0)
    for what, factor in wanted.items():
        if factor != 1:
            for path in _carriers(model, what, multipliers.keys()):
                multipliers[path] *= factor

    def scale(path: str, dims: Any, weight: Weight, there: Weight) -> Scale:
        in_layers = is_in_stack(path, type(table))
        a = multipliers[path]
        here, of_base = (_sides(each, in_layers, is_tied(dims, weight)) for each in (weight, there))
        inputs = here[0] / of_base[0]
        outputs = here[1] / of_base[1]
        longer = max(here) / max(of_base)
        std = a * there.std / (inputs if outputs == 1 else math.sqrt(inputs))
        return Scale(std, a * there.mean, inputs, outputs, longer, depth if in_layers else 1.0, a)

    return jax.tree.unflatten(
        structure, [scale(*each, there) for each, there in zip(arrays, leaves, strict=True)]
    )


def initial_table(c: OptimizerConfig, model: LanguageModel) -> Any:
    """The model's table with the initial values of optimizer.parametrization.

    Raises ValueError as scales_of.
    """
    return jax.tree.map(
        lambda weight, scale: dataclasses.replace(weight, std=scale.std, mean=scale.mean),
        model.table,
        scales_of(c, model),
    )


def _sides(weight: Weight, in_layers: bool, is_tied: bool) -> tuple[int, int]:
    """Fan-in and fan-out of a weight.

    A lookup, also in a table that is tied, a gain and a bias have one input.
    """
    if weight.kind == "vector":
        return 1, math.prod(weight.shape[in_layers:])
    if weight.kind == "embedding" or is_tied:
        return 1, weight.shape[-1]
    if weight.kind == "unembedding":
        return weight.shape[-1], 1  # a vocabulary of another size is not a width
    end = len(weight.shape) - (weight.outputs or 1)
    return math.prod(weight.shape[end - (weight.inputs or 1) : end]), math.prod(weight.shape[end:])


def _carriers(model: LanguageModel, what: str, paths: Collection[str]) -> list[str]:
    """Paths of the weights into which a multiplier is folded.

    Raises ValueError if they are not known.

    Each class of weights makes its own choice, since layers of several kinds may have other
    weights.
    """
    own = getattr(model, "multipliers", {})
    if not {*own} <= {*CARRIERS}:
        raise ValueError(
            f"multipliers has {', '.join(own)}; it maps {', '.join(CARRIERS)} to weights."
        )
    found = []
    for choice in [[(name,)] for name in own[what]] if what in own else CARRIERS[what]:
        chosen: list[str] = []
        for of_class in dict.fromkeys(path.rpartition(".")[0] for path in paths):
            in_class = [path for path in paths if path.rpartition(".")[0] == of_class]
            named = ([path for path in in_class if _is_one(path, group)] for group in choice)
            chosen += next((of_group for of_group in named if of_group), [])
        if not chosen:
            raise ValueError(
                f"model.module is {model.config.module!r}, which has no weight "
                f"{' or '.join(x[0] for x in choice)} that scales the {what}. Name those to which "
                "it is proportional in its Model: "
                f'multipliers = {{"{what}": ["<weight>"]}}.'
            )
        found += chosen
    return found


def _is_one(path: str, names: Collection[str]) -> bool:
    """True if a weight has one of these names in its class, or of `part.name` in a class of
    parts.
    """
    return any(f".{path}".endswith(f".{name}") for name in names)
