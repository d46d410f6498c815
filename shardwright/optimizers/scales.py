"""muP and CompleteP: how each weight begins and learns, by its kind and its size relative to a base model.

The base is the model for which settings were tuned: the run's, with the sizes in `optimizer.base`. A weight with a
fan-in of `inputs` times that of the base, and a fan-out of `outputs` times, begins and learns so:

                  initial std      learning rate, Adam    Muon                        Adam's epsilon    weight decay
    any weight    1/√inputs (*)    1/inputs               √(outputs/inputs/longer)    1/outputs         1/rate

(*) 1/inputs if its outputs are as many as those of the base: the output projection, a router. An embedding, a gain and
a bias have one input. `longer` is the ratio of the longer sides, which Muon's update has as a factor already. This is
table 3 of arXiv 2203.03466 (Tensor Programs V); for Muon it is the spectral condition of arXiv 2310.17813.

Multipliers act on three values of the forward pass. They are folded into weights, so that no model has to apply them:
the scores of attention (1/d_head in place of 1/√d_head), the output of a residual branch (1/depth, arXiv 2505.01618
with α = 1), and the logits of a tied table (1/width, table 8). With W' = aW in place of W and a multiplier a, the model
computes the same. The gradient of W' is 1/a of that of W, which Adam, Muon and other optimizers divide out, so W' moves
as W does if its rate is a times as large, its epsilon 1/a, and its decay 1/a. Checkpoints and exports hold W'.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from shardlib.array_types import arrays_in
from shardwright.modeling.model import LanguageModel
from shardwright.modeling.weights import Weight
from shardwright.optimizers.config import OptimizerConfig

CARRIERS: Mapping[str, list[list[tuple[str, ...]]]] = {
    "scores": [[("q_norm",), ("q_norm_all",), ("w_q", "b_q")]],
    "residual": [[("attention_out_norm",), ("w_o", "b_o")], [("mlp_out_norm",), ("w_down", "b_down", "shared_down")]],
    "logits": [[("final_norm",), ("final_gain", "final_bias")]],
}
"""Weights into which each multiplier is folded, by the names that train.py and shardwright/models use. For each value
that it multiplies, the first alternative that the model has. `Model.multipliers` names those of another model."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How a weight begins and learns, relative to that of the base model.

    Attributes:
        std, mean: initial values.
        inputs: fan-in, divided by that of the base.
        outputs: fan-out, divided by that of the base.
        longer: the longer of the two, divided by that of the base.
        multiplier: product of the multipliers that are folded into it.
        depth: layers, divided by those of the base, if it is in a layer whose branches have a multiplier.
    """

    std: float
    mean: float
    inputs: float = 1.0
    outputs: float = 1.0
    longer: float = 1.0
    multiplier: float = 1.0
    depth: float = 1.0

    def rate(self, algorithm: str) -> float:
        """Factor on the learning rate. Weight decay is divided by it, so that their product stays that of the base."""
        width = math.sqrt(self.outputs / self.inputs / self.longer) if algorithm == "muon" else 1 / self.inputs
        return self.multiplier * width

    @property
    def epsilon(self) -> float:
        """Factor on Adam's epsilon: that by which gradients are smaller than those of the base."""
        return 1 / (self.outputs * self.multiplier * self.depth)


def base_of(c: OptimizerConfig, model: LanguageModel) -> LanguageModel:
    """The base model. It is the model itself by optimizer.parametrization=standard; by mup it has as many layers."""
    if c.parametrization == "standard":
        return model
    settings = c.base if c.parametrization == "completep" else {**c.base, "layers": model.c.layers}
    return type(model)(dataclasses.replace(model.c, **settings))


def scales_of(c: OptimizerConfig, model: LanguageModel) -> Any:
    """The Scale of each weight, in a tree like the model's table.

    Raises:
        ValueError: the base has other weights, or no weight can hold a multiplier.
    """
    base, table = base_of(c, model), model.table
    own = {} if base is model else getattr(model, "multipliers", {})
    if jax.tree.structure(base.table) != jax.tree.structure(table):
        raise ValueError("optimizer.base changes which weights the model has; give only its sizes, such as d_model.")
    depth = model.c.layers / base.c.layers
    tied = tied_tables(table)
    names = {path: path.rpartition(".")[2] for path, _, _ in _entries(table)}
    wanted = {"scores": _scores(model.c) / _scores(base.c), "residual": 1 / depth}
    for (path, _, weight), (_, _, of_base) in zip(_entries(table), _entries(base.table), strict=True):
        if path in tied:
            wanted["logits"] = of_base.shape[-1] / weight.shape[-1]
    multipliers = dict.fromkeys(names, 1.0)
    for what, factor in wanted.items():
        for path in _carriers(model, what, own.get(what), names) if factor != 1 else ():
            multipliers[path] *= factor

    found = []
    for (path, _, weight), (_, _, of_base) in zip(_entries(table), _entries(base.table), strict=True):
        in_layers = path.startswith("layers.")
        here, there = (_sides(each, in_layers, path in tied) for each in (weight, of_base))
        inputs, outputs, longer = here[0] / there[0], here[1] / there[1], max(here) / max(there)
        power = 1.0 if outputs == 1 else 0.5
        a = multipliers[path]
        std, mean = a * of_base.std / inputs**power, a * of_base.mean
        found.append(Scale(std, mean, inputs, outputs, longer, a, depth if in_layers else 1.0))
    return jax.tree.unflatten(jax.tree.structure(table), found)


def initial_table(c: OptimizerConfig, model: LanguageModel) -> Any:
    """The model's table with the initial values of optimizer.parametrization. Raises ValueError as scales_of."""
    begin = lambda weight, scale: dataclasses.replace(weight, std=scale.std, mean=scale.mean)
    return jax.tree.map(begin, model.table, scales_of(c, model))


def tied_tables(table: Any) -> set[str]:
    """Names of the output projections that are also embeddings: the only table of their dim."""
    first = lambda kind: {path: t.spec.dims[0].name for path, t, weight in _entries(table) if weight.kind == kind}
    embeddings = {*first("embedding").values()}
    return {path for path, dim in first("unembedding").items() if dim not in embeddings}


def _entries(table: Any) -> Iterator[tuple[str, Any, Weight]]:
    """Name, type and Weight of each array of a table."""
    return ((path.removeprefix("."), t, weight) for path, t, weight in arrays_in(type(table), table))


def _sides(weight: Weight, in_layers: bool, is_tied: bool) -> tuple[int, int]:
    """Fan-in and fan-out of a weight. A lookup, a gain and a bias have one input."""
    if weight.kind == "vector":
        return 1, math.prod(weight.shape[in_layers:])
    if weight.kind == "embedding" or is_tied:
        return 1, weight.shape[-1]
    if weight.kind == "unembedding":
        return weight.shape[-1], weight.shape[0]
    end = len(weight.shape) - (weight.outputs or 1)
    return math.prod(weight.shape[end - (weight.inputs or 1) : end]), math.prod(weight.shape[end:])


def _scores(c: Any) -> float:
    """Factor of muP on the products of queries and keys, divided by that of the model, up to a constant."""
    return math.sqrt(getattr(c, "attention_scalar", None) or c.d_head) / c.d_head


def _carriers(model: LanguageModel, what: str, own: Sequence[str] | None, names: Mapping[str, str]) -> list[str]:
    """Names of the weights into which a multiplier is folded, of the model's `own`. Raises ValueError if none is."""
    choices = [[tuple(own)]] if own else CARRIERS[what]
    weights = {names[path]: weight for path, _, weight in _entries(model.table)}
    found = [next((names_ for names_ in choice if weights.keys() & names_[:1]), ()) for choice in choices]
    if not all(found):
        raise ValueError(
            f"model.module is {model.c.module!r}: no weight is known that scales the {what}. Name those to which it is "
            f'proportional in its Model: multipliers = {{"{what}": ["<weight>"]}}.'
        )
    for group in found:
        if not any(weights[name].std or weights[name].mean for name in group if name in weights):
            raise ValueError(
                f"{group[0]} is 0 at first, so it can't hold the multiplier of the {what}; turn off model.norm_offset, "
                "or keep optimizer.parametrization=standard."
            )
    return [path for path, name in names.items() if any(name in group for group in found)]
