"""Statistics of a step's values, by name and source line, which a second program computes."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.parsing import sort_axes
from shardlib.placement import LayerPlacement
from shardlib.shardtypes import Array, make_shardings
from shardwright.cluster.watch import pause
from shardwright.data.loader import TokenBatch
from shardwright.inspect.statistics.rerun import Path, Point, Rerun, gradient_paths, saved_points
from shardwright.modeling import fp8
from shardwright.modeling.weights import is_in_stack
from shardwright.program.config import check_divides
from shardwright.program.stages import folded_mesh, without_stages
from shardwright.program.step import Step

NAMES = ("rms", "max", "zeros", "bf16", "fp8")
"""Root mean square; largest magnitude; share of zeros; shares of the other entries that bf16 rounds
to zero, and that FP8 does, with the scale of shardwright/modeling/fp8.py, but one scale for the
whole value."""


def sums(x: jax.Array, rows: bool = False, of_gradient: bool = False) -> jax.Array:
    """Computes the input of `finished`, f32[6] or with `rows` f32[6, rows], the same on all
    devices.

    Inside shard_map it covers the blocks of all devices, by sums over the axes over which `x`
    varies. Outside, `x`.

    Args:
        x: floats, at most 2**31 on a device.
        rows: True if each row of the first dim is a separate value.
        of_gradient: True for the FP8 format of gradients, e5m2, instead of e4m3.
    """
    over = sort_axes(jax.typeof(x).manual_axis_type.varying)
    within = tuple(range(int(rows), x.ndim))

    def reduce(collective: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        return collective(x, over) if over else x

    x32 = x.astype(jnp.float32)
    dtype = fp8.GRADIENTS if of_gradient else fp8.FORWARD
    peak = reduce(lax.pmax, jnp.max(jnp.abs(x32), axis=within, initial=0.0))
    scaled = x32 / jnp.expand_dims(fp8.scale_of(peak, dtype), within)
    is_zero = x32 == 0
    of_bf16, of_fp8 = (
        ~is_zero & (y == 0) for y in (x32.astype(jnp.bfloat16), scaled.astype(dtype))
    )
    # Exact on each device as integers, then rounded once.
    counts = [
        jnp.sum(y, axis=within, dtype=jnp.int32)
        for y in (is_zero, of_bf16, of_fp8, jnp.ones_like(is_zero))
    ]
    total = jnp.stack(
        [jnp.sum(jnp.square(x32), axis=within), *(count.astype(jnp.float32) for count in counts)]
    )
    return jnp.concatenate([reduce(lax.psum, total), peak[None]])


def finished(found: np.ndarray) -> dict[str, np.ndarray]:
    """Computes the statistics, by NAMES, from the results f32[6, parts, values] of `sums`: one
    entry per value.
    """
    squares, zeros, bf16, of_fp8, count = found[:5].astype(np.float64).sum(1)
    nonzero = np.maximum(count - zeros, 1)
    shares = squares / count, zeros / count, bf16 / nonzero, of_fp8 / nonzero
    # some devices ignore NaN in a maximum
    largest = np.where(np.isnan(squares), np.nan, found[5].max(0))
    return dict(zip(NAMES, (np.sqrt(shares[0]), largest, *shares[1:]), strict=True))


class Statistics:
    """Statistics of a training step: of what it saves for the backward pass, its weights, gradients
    and updates.

    They are computed from the traced step, whose own program does not change. Each covers the whole
    value, so it is the same on every mesh up to rounding.

    Args:
        program: the jaxpr of the step: (state, batch, …) -> (state, metrics), with weights first in
            the state.
        weights: the state's weights, or their shapes: a dataclass with stacks of layers.
    """

    def __init__(self, program: object, weights: object):
        self._points = saved_points(program)
        self._gradients = gradient_paths(program, weights)
        leaves, _ = jax.tree_util.tree_flatten_with_path(weights)
        self._weights = [
            jax.tree_util.keystr(keys, simple=True, separator=".") for keys, _ in leaves
        ]
        self._stacks = [is_in_stack(name, type(weights)) for name in self._weights]
        paths = [*self._gradients, *(path for point in self._points for path in point.paths)]
        self._replay = Rerun(program, {path: [0] for path in paths}, self._visit, is_same=True)

    def _visit(
        self, path: Path, i: int, turns: tuple, operands: list, x: jax.Array, knobs: object
    ) -> tuple:
        if path in self._gradients:
            return x, sums(x, self._stacks[self._gradients.index(path)], of_gradient=True)
        return x, sums(x)

    def __call__(self, *args: object) -> dict[str, list]:
        """Computes the input of `described`.

        Arguments as for the step; under jit, on the mesh where it was traced.
        """
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

        Each has a name and the statistics of statistics.collect.NAMES: a number, or a list with one
        number per layer. A point has a `place`. A weight has the statistics of its `gradient`,
        before clipping, and `update`, the rms of its change divided by its own rms.
        """
        found = jax.tree.map(np.asarray, found)
        points = [
            {
                "name": point.name,
                "place": point.place,
                **_plain(finished(_in_order(point, x)), any(point.of_layers)),
            }
            for point, x in zip(self._points, found["points"], strict=True)
        ]
        weights = []
        for i, (name, rows) in enumerate(zip(self._weights, self._stacks, strict=True)):
            w, g, update = (
                finished(found[kind][i].reshape(6, 1, -1))
                for kind in ("weights", "gradients", "updates")
            )
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = _plain({"update": update["rms"] / w["rms"]}, rows)
            weights.append({"name": name, **_plain(w, rows), "gradient": _plain(g, rows), **ratio})
        return {"points": points, "weights": weights}


def _in_order(point: Point, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Reorders the measurements at a point, one array [*turns, n] for each of its paths, to [n,
    parts, layers].
    """
    found = np.stack(arrays, axis=-2)  # [*turns, paths, n]
    # in a loop over layers, the paths are one period of layers
    by_layer = [*point.of_layers, any(point.of_layers)]
    parts = [i for i, is_layer in enumerate(by_layer) if not is_layer]
    layers = [i for i, is_layer in enumerate(by_layer) if is_layer]
    sizes = (int(np.prod([found.shape[i] for i in dims], initial=1)) for dims in (parts, layers))
    return found.transpose(-1 % found.ndim, *parts, *layers).reshape(found.shape[-1], *sizes)


def _plain(values: Mapping[str, np.ndarray], by_layer: bool) -> dict[str, Any]:
    """Each statistic for JSON: a list if by layer; non-finite values become strings, as in all
    metrics.
    """
    return {
        k: [_shorten(x) for x in v.tolist()] if by_layer else _shorten(v.item())
        for k, v in values.items()
    }


def _shorten(x: float) -> float | str:
    """Drops the digits that f32 does not have."""
    x = float(f"{x:.7g}")
    return x if np.isfinite(x) else json.dumps(x)


class StepWithoutStages:
    """The training step on the current mesh without its pipeline stages, traced, for computing
    statistics.

    Args:
        step: the run's step.
        placement: placement of its layers.

    Attributes:
        mesh: the mesh without stages.
        program: the traced step, a ClosedJaxpr.

    Raises:
        ValueError: with stages, if the devices without stages do not divide the batch.
    """

    def __init__(self, step: Step, placement: LayerPlacement):
        step = step.other(mesh=folded_mesh(step.config))
        self.mesh = step.mesh
        self._placement = placement
        check_divides(step.config, self.mesh.shape)
        self.program = step.jaxpr

    @contextlib.contextmanager
    def arguments(
        self, state: Any, batch: TokenBatch, step: object, *clock: object
    ) -> Iterator[tuple[Any, ...]]:
        """Converts arguments of the step to the mesh without stages, which is the current mesh
        inside this context.
        """
        state = self.state(state)
        with jax.set_mesh(self.mesh):
            batch = jax.tree.map(
                jax.device_put, batch, make_shardings(Array["m", TokenBatch], like=batch)
            )
            yield state, batch, step, *clock

    def state(self, state: object) -> Any:
        """Converts a state of the current mesh to the one without stages, with layers in order."""
        return without_stages(state, self._placement, self.mesh)


class RunStatistics:
    """Statistics of the steps of a run, which do not change.

    With pipeline stages, of the step without them.

    Args:
        step, placement: as in StepWithoutStages.
        options: compiler options.

    Raises:
        ValueError: as in StepWithoutStages.
    """

    def __init__(self, step: Step, placement: LayerPlacement, options: dict[str, Any]):
        self._step = StepWithoutStages(step, placement)
        self._statistics = Statistics(self._step.program, step.model.table)
        self._program = jax.jit(self._statistics, compiler_options=options)

    @pause("computing statistics of a step")
    def collect(self, *arguments: Any) -> dict[str, Any]:
        """Returns statistics of the step for these arguments, as in Statistics.described.

        Waits for the devices.
        """
        with self._step.arguments(*arguments) as arguments:
            return self._statistics.described(jax.device_get(self._program(*arguments)))
