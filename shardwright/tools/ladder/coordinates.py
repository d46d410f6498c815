"""The coordinate check: trains models of several sizes, and finds values that depend on the
size.
"""

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from shardwright.cluster.devices import make_mesh, start_devices
from shardwright.data.checks import within
from shardwright.data.loader import TokenBatch
from shardwright.inspect.statistics.collect import StepWithoutStages
from shardwright.inspect.statistics.rerun import Rerun, gradient_paths, saved_points
from shardwright.jax_extra import SAVED
from shardwright.modeling.model import LOGITS as LOGITS_OF_MODEL
from shardwright.modeling.model import inputs_of, load_model
from shardwright.optimizers.rates import updates_of
from shardwright.program.changes import loader_at
from shardwright.program.checks import check_config
from shardwright.program.config import Config, check_divides
from shardwright.program.stages import placement_of
from shardwright.program.step import trace_step
from shardwright.settings.output import say
from shardwright.tools.report.screen import print_table

GROWS, SHRINKS = 0.12, -0.6
"""Slopes between which a value counts as independent of the size. Sums of random signs shrink by
1/√width, -0.5."""
GROWS_ANYWAY = 0.35
"""In place of GROWS for what grows a little in models with all scales: any value over depth, and
gradients of weights outside of layers. The last norm's depends on the initial logits of narrow
models."""
LOGITS, GRADIENT = "logits", "gradient of "
Runs = Sequence[tuple[int, Sequence[float]]]
"""Of one value in several runs: multiple of the base, and what `measure` found at each step."""


@dataclasses.dataclass
class LadderConfig:
    """The section `ladder` of `coordinates`."""

    widths: list[int] = dataclasses.field(default_factory=lambda: [1, 2, 4, 8])
    """Multiples of the sizes in optimizer.base, except of layers, to train; [] for none."""
    depths: list[int] = dataclasses.field(default_factory=list)
    """Multiples of its layers to train, at its width; [] for none."""
    steps: int = within(1, 100, 3)
    """Updates of each model, all on the first batch, with the peak learning rate."""
    seeds: int = within(1, 100, 2)
    """Runs of each model, from training.seed on."""


def sizes_at(c: Config, axis: str, n: int) -> dict[str, Any]:
    """The sizes in optimizer.base, its layers (axis depth) or its others times n.

    Raises ValueError without a base.
    """
    if not c.optimizer.base:
        raise ValueError(
            "optimizer.base is missing; give the sizes to multiply: 'optimizer.base={d_model: 64}'."
        )
    sizes = {"layers": c.model.layers, **c.optimizer.base}
    grows = [
        k for k, size in sizes.items() if type(size) is int and (k == "layers") == (axis == "depth")
    ]
    return {k: n * v if k in grows else v for k, v in sizes.items()}


def ladder_of(c: Config, settings: LadderConfig) -> Iterator[tuple[str, int, Config]]:
    """The models to train: axis, multiple, and configuration.

    Raises ValueError without optimizer.base.
    """
    constant = {
        "warmup_steps": 0,
        "schedule": "constant",
        "schedule_steps": None,
        "cooldown_steps": None,
    }
    optimizer = dataclasses.replace(c.optimizer, **constant)
    for axis, multiples in {"width": settings.widths, "depth": settings.depths}.items():
        for n in multiples:
            model = dataclasses.replace(c.model, **sizes_at(c, axis, n))
            yield axis, n, dataclasses.replace(c, model=model, optimizer=optimizer)


def measure(
    c: Config, batch: TokenBatch, steps: int, seeds: int
) -> Iterator[tuple[str, list[float]]]:
    """Trains `c` from several seeds on the current mesh, all steps on one batch.

    Yields numbers for each step.

    Of an activation: the rms of its change since the first step; of logits, the rms of the mean
    change over positions, in which random parts cancel. Of a weight: the rms of its gradient before
    clipping, divided by the factor on its epsilon, which is by how much Adam expects it to differ
    from that of the base.
    """
    model = load_model(c.model)
    step = trace_step(c, model)
    bare = StepWithoutStages(step, placement_of(c, model))
    start = step.other(name="start").lowered.compile()
    points = saved_points(bare.program, (SAVED, LOGITS_OF_MODEL))
    names = [point.name for point in points]
    # without those of the loss, which follow
    names = [*names[: names.index("checked_logits logits")], LOGITS]
    paths = [point.paths for point, _ in zip(points, names, strict=False)]
    paths += [(path,) for path in gradient_paths(bare.program, model.table)]
    updates = jax.tree_util.tree_flatten_with_path(
        updates_of(c.optimizer, model, step.spec.optimizers)
    )[0]
    wanted = {path: [0] for own in paths for path in own}
    rerun = Rerun(
        bare.program, wanted, lambda path, i, turns, operands, x, knobs: (x, x.astype(jnp.float32))
    )

    @jax.jit
    def run(state, *others):
        results, values = rerun(*jax.tree.leaves((state, *others)))
        of_path = {note.path: value for note, value in zip(rerun.notes, values, strict=True)}
        new = jax.tree.unflatten(jax.tree.structure(state), results[: len(jax.tree.leaves(state))])
        return new, [[of_path[path] for path in own] for own in paths]

    @jax.jit
    def sizes(now, first):
        for i, name in enumerate(names):
            now[i] = jax.tree.map(jnp.subtract, now[i], first[i])
            if name == LOGITS:  # [*axes of the mesh, *turns, B, L, V], where t shards V
                axes = bare.mesh.axis_names
                over = [j for j in range(now[i][0].ndim - 1) if j >= len(axes) or axes[j] != "t"]
                now[i] = [jnp.mean(x, axis=over) for x in now[i]]
        return [jnp.sqrt(sum(jnp.mean(jnp.square(x)) for x in xs) / len(xs)) for xs in now]

    for seed in range(c.training.seed, c.training.seed + seeds):
        state = bare.state(start(jax.random.key(seed)))
        first = None
        found = []
        for i in range(steps + 1):
            with bare.arguments(state, batch, np.int32(i), *step.arguments()) as arguments:
                state, values = run(*arguments)
                first = first or values
                found.append(jax.device_get(sizes(values, first)))
        numbers = np.array(found).T
        yield from ((name, x[1:].tolist()) for name, x in zip(names, numbers, strict=False))
        for (path, update), x in zip(updates, numbers[len(names) :], strict=True):
            yield (
                GRADIENT + jax.tree_util.keystr(path, simple=True, separator="."),
                (x / update.epsilon).tolist(),
            )


def limit_of(axis: str, name: str) -> float:
    """The largest slope at which a value counts as independent of the size."""
    is_outside = name.startswith(GRADIENT) and not name.startswith(f"{GRADIENT}layers.")
    return GROWS_ANYWAY if is_outside or axis == "depth" else GROWS


def slope_of(runs: Runs, grows: float = GROWS) -> tuple[float, float, str]:
    """Fits a line of log(number) over log(multiple) at each step.

    Returns the worst: slope, standard error, verdict.

    The verdict says whether the value depends on the size of the model, by more than twice the
    error. It is ZERO if there is no step at which all numbers are above 0, and NOT FINITE if one is
    infinite or NaN.
    """
    if not np.isfinite([numbers for _, numbers in runs]).all():
        return math.nan, math.nan, "NOT FINITE"
    x = np.log2([n for n, _ in runs])
    found = []
    x = x - np.mean(x)
    for numbers in np.array([numbers for _, numbers in runs]).T:
        if np.all(numbers > 0):  # where a weight begins at 0, others may have no gradient at first
            y = np.log2(numbers) - np.mean(np.log2(numbers))
            slope = np.sum(x * y) / np.sum(x * x)
            error = math.sqrt(np.sum((y - slope * x) ** 2) / (len(x) - 2) / np.sum(x * x))
            found.append((max(slope - grows, SHRINKS - slope) - 2 * error, float(slope), error))
    if not found:
        return math.nan, math.nan, "ZERO"
    excess, slope, error = max(found)
    return slope, error, "ok" if excess <= 0 else "GROWS" if slope > 0 else "SHRINKS"


def check_coordinates(c: Config, settings: LadderConfig) -> None:
    """Trains the models, and prints the slopes.

    Exits with status 1 if a value depends on the size.
    """
    sizes = [len(set(x)) for x in (settings.widths, settings.depths) if x]
    if settings.seeds * min(sizes, default=0) < 3 or 1 in sizes:
        raise ValueError(
            "ladder has too few runs for a slope with an error; give three widths or depths, or "
            "two seeds."
        )
    start_devices(c.distributed, c.hardware)
    found: dict[tuple[str, str], list] = {}
    with jax.set_mesh(make_mesh(jax.devices(), **dataclasses.asdict(c.mesh))):
        for axis, n, own in ladder_of(c, settings):
            check_config(own)
            check_divides(own, jax.sharding.get_mesh().shape)
            batch = loader_at(own, 0, inputs_of(load_model(own.model))).load(0)
            for name, numbers in measure(own, batch, settings.steps, settings.seeds):
                found.setdefault((axis, name), []).append((n, numbers))
            print(f"{axis} × {n}", file=sys.stderr)
    slopes = {of: slope_of(runs, limit_of(*of)) for of, runs in found.items()}
    rows = [(name, axis, *slope) for (axis, name), slope in slopes.items()]
    shown = [
        (name, axis, f"{slope:+.2f} ± {error:.2f}", verdict)
        for name, axis, slope, error, verdict in rows
    ]
    print_table(Console(), ["value", "over", "slope", "verdict"], shown)
    bad = sum(row[-1] != "ok" for row in rows)
    say(f"{bad or 'None'} of {len(rows)} values depend on the size of the model.")
    if bad:
        sys.exit(1)
