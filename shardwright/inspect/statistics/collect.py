"""Builds a second program for the training step that computes statistics of its values, by name and source line."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardwright.inspect.statistics.measures import finished, sums
from shardwright.inspect.statistics.points import Point, gradient_paths, saved_points
from shardwright.inspect.statistics.rerun import Path, Rerun
from shardwright.modeling.weights import is_in_stack


class Statistics:
    """Statistics of a training step: of what it saves for the backward pass, its weights, gradients and updates.

    They are computed from the traced step, whose own program does not change. Each covers the whole value, so it is the
    same on every mesh up to rounding.

    Args:
        program: the jaxpr of the step: (state, batch, …) -> (state, metrics), with weights first in the state.
        weights: the state's weights, or their shapes: a dataclass with stacks of layers.
    """

    def __init__(self, program: object, weights: object):
        self._points = saved_points(program)
        self._gradients = gradient_paths(program, weights)
        leaves, _ = jax.tree_util.tree_flatten_with_path(weights)
        self._weights = [jax.tree_util.keystr(keys, simple=True, separator=".") for keys, _ in leaves]
        self._stacks = [is_in_stack(name, type(weights)) for name in self._weights]
        paths = [*self._gradients, *(path for point in self._points for path in point.paths)]
        self._replay = Rerun(program, {path: [0] for path in paths}, self._visit, is_same=True)

    def _visit(self, path: Path, i: int, turns: tuple, operands: list, x: jax.Array, knobs: object) -> tuple:
        if path in self._gradients:
            return x, sums(x, self._stacks[self._gradients.index(path)], of_gradient=True)
        return x, sums(x)

    def __call__(self, *args: object) -> dict[str, list]:
        """Computes the input of `described`. Arguments as for the step; under jit, on the mesh where it was traced."""
        leaves = jax.tree.leaves(args)
        results, values = self._replay(*leaves)
        of_path = {note.path: value for note, value in zip(self._replay.notes, values, strict=True)}
        of_weights = zip(leaves, results, self._stacks, strict=False)
        both = [(sums(w, rows), sums(new - w, rows)) for w, new, rows in of_weights]
        return {
            "points": [[of_path[path] for path in point.paths] for point in self._points],
            "gradients": [of_path[path] for path in self._gradients],
            "weights": [w for w, _ in both],
            "updates": [update for _, update in both],
        }

    def described(self, found: Mapping[str, Sequence]) -> dict[str, list[dict[str, Any]]]:
        """Returns the statistics as JSON values: `points`, in program order, and `weights`.

        Each has a name and the statistics of statistics.measures.NAMES: a number, or a list with one number per layer.
        A point has a `place`. A weight has the statistics of its `gradient`, before clipping, and `update`, the rms of
        its change divided by its own rms.
        """
        found = jax.tree.map(np.asarray, found)
        points = [
            {"name": point.name, "place": point.place, **_plain(finished(_in_order(point, x)), any(point.of_layers))}
            for point, x in zip(self._points, found["points"], strict=True)
        ]
        weights = []
        for i, (name, rows) in enumerate(zip(self._weights, self._stacks, strict=True)):
            w, g, update = (finished(found[kind][i].reshape(6, 1, -1)) for kind in ("weights", "gradients", "updates"))
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = _plain({"update": update["rms"] / w["rms"]}, rows)
            weights.append({"name": name, **_plain(w, rows), "gradient": _plain(g, rows), **ratio})
        return {"points": points, "weights": weights}


def _in_order(point: Point, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Reorders the measurements at a point, one array [*turns, n] for each of its paths, to [n, parts, layers]."""
    found = np.stack(arrays, axis=-2)  # [*turns, paths, n]
    by_layer = [*point.of_layers, any(point.of_layers)]  # in a loop over layers, the paths are one period of layers
    parts = [i for i, is_layer in enumerate(by_layer) if not is_layer]
    layers = [i for i, is_layer in enumerate(by_layer) if is_layer]
    sizes = (int(np.prod([found.shape[i] for i in dims], initial=1)) for dims in (parts, layers))
    return found.transpose(-1 % found.ndim, *parts, *layers).reshape(found.shape[-1], *sizes)


def _plain(values: Mapping[str, np.ndarray], by_layer: bool) -> dict[str, Any]:
    """Each statistic for JSON: a list if by layer; non-finite values become strings, as in all metrics."""
    return {k: [_shorten(x) for x in v.tolist()] if by_layer else _shorten(v.item()) for k, v in values.items()}


def _shorten(x: float) -> float | str:
    """Drops the digits that f32 does not have."""
    x = float(f"{x:.7g}")
    return x if np.isfinite(x) else json.dumps(x)
