"""Chooses small sizes at which a step is still the same program, and draws arguments for it.

A step is checked by running it (shardlib.exact), which is only affordable at small sizes. They keep
what decides which program is traced: the attention as it was chosen, one entry on a device where
the run has one, the stages and their microbatches, and the ring over c. shardlib.exact.sizes then
compares the traces at both sizes, equation by equation.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from shardlib.array_types import arrays_in
from shardlib.axes import PIPELINE_AXIS
from shardlib.exact.endings import Undecided
from shardlib.exact.values import is_key
from shardlib.grouped import LEAST_ROWS
from shardlib.planned import target_device
from shardlib.tracing import tracing, without_mesh
from shardwright.modeling.attention_calls import path_of
from shardwright.modeling.attention_paths import KERNELS
from shardwright.modeling.blockwise import BLOCK, BLOCKS
from shardwright.modeling.model import period_of
from shardwright.program.config import Config, check_divides
from shardwright.program.step import Step, with_settings

MOST_DEVICES = 16
"""Number of devices that a small mesh should not exceed."""
FEW = 4
"""Numbers of entries on a device up to this stay as they are: heads of a group, experts of a
token."""
MANY = (5, 7, 11, 13, 17, 19, 23, 29)
"""Numbers of entries on a device in place of larger ones. As no one is a product of others, a size
of the small program can only be one product of dims."""
AS_POSITIONS = FEW + 1
"""Other settings from this number on are taken for positions, such as a window."""
FACTORS = range(2, 14)
"""By what a size may have to be a multiple of what was chosen, such as the number of heads."""
LENGTH = 8
"""Least positions of a sequence, so that it has several documents."""
UNIT = 8
"""Multiple of which a sequence has, if the run's is one, because a model may divide it."""
TURNS = 3
"""Iterations of loops over layers, microbatches, blocks and chunks."""


@dataclasses.dataclass(frozen=True)
class Small:
    """A step at small sizes.

    Attributes:
        step: the step, on an abstract mesh.
        real: the step at the run's sizes that is the same program.
        dims: by name, the sizes that differ: (the run's, small).
        axes: devices along each axis of the mesh: (the run's, small).
        kernels: the kernels of attention that it computes by blockwise attention.
    """

    step: Step
    real: Step
    dims: Mapping[str, tuple[int, int]]
    axes: Mapping[str, tuple[int, int]]
    kernels: tuple[str, ...] = ()


def make_small(
    step: Step,
    length: int = LENGTH,
    axes: Mapping[str, int] | None = None,
    numbers: Sequence[int] = MANY,
) -> Small:
    """Chooses small sizes for a step. A setting whose small size the model refuses stays as it is.

    Args:
        step: the step.
        length: least positions of a sequence.
        axes: number of devices along each axis of the mesh; None: few.
        numbers: numbers of entries on a device in place of larger ones.

    Raises:
        Undecided: the model refuses all that were tried.
    """
    mesh = dict(step.mesh.shape)
    paths = attention_paths_of(step)
    kernels = tuple(sorted({*paths} & {*KERNELS}))
    as_reference = {"training.attention": "blockwise"} if kernels else {}
    with tracing(step.mesh):
        is_gpu = target_device().platform == "gpu"
    # Each device chooses the FP8 scales of its own blocks, so the rounding depends on the mesh.
    real = step.other({**as_reference, "training.fp8": False}, plain_sums=is_gpu)
    axes = axes or _fewer_devices(mesh)
    edits = _of_training(step, axes, paths, min(length, step.config.training.seq_len))
    edits |= _of_model(step, axes, edits["training.seq_len"], numbers)
    ways = (with_settings(real.config, way) for way in _ways(edits))
    steps = (_step_on(step, real, c, axes) for c in ways if not _refusal(c, axes))
    first = next(steps, None)
    if first is None:
        refusal = _refusal(with_settings(real.config, edits), axes)
        raise Undecided(f"the model has no sizes that are small enough to be run: {refusal}")
    specs = _specs(real)
    made = next(
        (small for small in itertools.chain([first], steps) if _specs(small) == specs), first
    )
    pairs = {axis: (mesh[axis], made.mesh.shape[axis]) for axis in mesh}
    return Small(made, real, _dims(real, made), pairs, kernels)


def attention_paths_of(step: Step) -> list[str]:
    """Returns the implementation of each call of attention in training and evaluation."""
    with tracing(step.mesh):
        calls = [*step.other(name="evaluation").calls, *step.other(name="training").calls]
        return [path_of(step.forward, call) for call in calls]


def make_other(step: Step, small: Small, length: int = LENGTH) -> Small | None:
    """Returns a step with other sizes than a small one, if that has fewer devices than the run;
    else None.

    Two small programs tell what one cannot: min(axis_size, 3) is the number of devices if there are
    three.
    """
    others = {
        axis: few if few == real else (2 if few == 3 else 3)
        for axis, (real, few) in small.axes.items()
    }
    few = {axis: few for axis, (_, few) in small.axes.items()}
    return make_small(step, 2 * length, others, MANY[1:]) if others != few else None


def _fewer_devices(mesh: Mapping[str, int]) -> dict[str, int]:
    """Chooses up to three devices for each axis, but all of c and p."""
    kept = "c", PIPELINE_AXIS
    axes = {axis: size if axis in kept else min(size, 3) for axis, size in mesh.items()}
    for axis in "rdet":
        if math.prod(axes.values()) > MOST_DEVICES and axes.get(axis, 1) > 2:
            axes[axis] = 2
    return axes


def _of_training(
    step: Step, axes: Mapping[str, int], paths: list[str], least: int
) -> dict[str, Any]:
    """Edits of sizes of the batch, and of choices that depend on them."""
    t = step.config.training
    mesh = step.mesh.shape
    edits: dict[str, Any] = {}
    microbatches = t.microbatches if axes.get(PIPELINE_AXIS, 1) > 1 else min(t.microbatches, 2)
    edits["training.microbatches"] = microbatches
    # of texts, there may be any
    rows = max(t.batch_size // (t.microbatches * _count(mesh, "rde")), 1)
    edits["training.batch_size"] = microbatches * _count(axes, "rde") * min(rows, 2)

    in_chunks = min(t.seq_len // (t.loss_chunk or t.seq_len), TURNS)
    ring = t.context == "ring" and mesh.get("c", 1) > 1
    local = t.seq_len // _count(mesh, "c")
    blocks = min(-(-local // _block(step)), 2)
    if "einsum" in paths:
        blocks = 1
    per_device = _count(axes, "t") * (1 + ring) * in_chunks * blocks
    if (t.loss_chunk or t.seq_len) > _count(mesh, "ct"):
        # fewer slots than positions
        least = max(least, 3 * LEAST_ROWS // 2) if slots_of(step) else least
        per_device *= max(2, -(-least // (per_device * _count(axes, "c"))))
        per_device = math.lcm(per_device, math.gcd(local, UNIT))
    edits["training.seq_len"] = length = per_device * _count(axes, "c")
    if t.loss_chunk is not None:
        edits["training.loss_chunk"] = length // in_chunks
    if {*paths} - {"einsum"}:
        edits["training.attention"] = "blockwise"
        edits["training.attention_block"] = per_device // blocks
    elif paths:
        edits["training.attention"] = "einsum"
    return edits


def _of_model(
    step: Step, axes: Mapping[str, int], length: int, numbers: Sequence[int]
) -> dict[str, Any]:
    """Edits of sizes of the model: as many entries on a device if they are few, else a few."""
    c = step.config.model
    names = {name: dim for dim, name in getattr(c, "dims", {}).items()}
    table = step.model.table
    over: dict[str, set[str]] = {}
    with tracing(step.mesh):
        for _, array, _ in arrays_in(type(table), table):
            for dim in array.spec.dims:
                over.setdefault(dim.name, set()).update(axis for axis in dim.axes if axis in axes)
    edits: dict[str, Any] = {}
    sizes = {field.name: getattr(c, field.name) for field in dataclasses.fields(c)}
    sizes = {name: n for name, n in sizes.items() if type(n) is int}
    shards = {name: over.get(names.get(name, ""), set()) for name in sizes}
    following = iter(numbers)
    over_heads = step.config.training.context == "ulysses" and axes.get("c", 1) > 1
    # The dims that most devices share get the least numbers.
    for name, n in sorted(
        sizes.items(), key=lambda pair: (-_count(axes, shards[pair[0]]), pair[1])
    ):
        local = n // _count(step.mesh.shape, shards[name])
        if n <= FEW and not shards[name]:
            continue
        if name == "bos_id":
            n = 1
        elif name in names and name != "positions":
            # Entries of a head are pairs for RoPE. Devices of c may divide the heads.
            is_kept = local <= FEW or (name in ("n_kv", "n_q_per_kv") and over_heads)
            few = local if is_kept else next(following) * (1 if shards[name] else 2)
            n = few * _count(axes, shards[name])
        elif n >= AS_POSITIONS:
            n = max(2, -(-n * length // step.config.training.seq_len))
        edits[f"model.{name}"] = n
    stages = _count(axes, PIPELINE_AXIS) * step.config.pipeline.virtual_stages
    period = period_of(step.model) * stages
    edits["model.layers"] = period * min(c.layers // period, TURNS if period == 1 else 2)
    return edits


def _specs(step: Step) -> list[str]:
    """Returns how each weight is sharded, which may depend on what its dims can be divided by."""
    table = step.model.table
    with tracing(step.mesh):
        return [str(array.spec) for _, array, _ in arrays_in(type(table), table)]


def slots_of(step: Step) -> int | None:
    """Returns the slots of a mixture of experts for a sequence."""
    c: Any = step.config.model
    return c.slots(step.config.training.seq_len) if callable(getattr(c, "slots", None)) else None


def _block(step: Step) -> int:
    """Returns the largest block of blockwise attention."""
    with tracing(step.mesh):
        platform = target_device().platform
    return step.config.training.attention_block or BLOCKS.get(platform, BLOCK)


def _count(axes: Mapping[str, int], names: Any) -> int:
    return math.prod(axes.get(axis, 1) for axis in names)


def _ways(edits: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields edits, then with a size that is a multiple of another, then without one."""
    sizes = {name: n for name, n in edits.items() if name.startswith("model.")}
    yield edits
    for factor, name in itertools.product(FACTORS, sizes):
        yield {**edits, name: sizes[name] * factor}
    for kept in edits:
        yield {name: x for name, x in edits.items() if name != kept}


def _refusal(c: Config, axes: Mapping[str, int]) -> str:
    """Returns why the model refuses these sizes; empty if it takes them."""
    try:
        c.model.check(c.training.seq_len)
        check_divides(c, axes)
    except (ValueError, AssertionError) as error:
        return str(error) or type(error).__name__
    return ""


def _step_on(step: Step, real: Step, c: Config, axes: Mapping[str, int]) -> Step:
    """Returns the step with other settings, on an abstract mesh."""
    of: Any = getattr(step.mesh, "abstract_mesh", step.mesh)
    Model: Any = type(step.model)
    kinds = tuple(step.mesh.axis_types)
    mesh = AbstractMesh(
        tuple(axes.values()), tuple(axes), axis_types=kinds, abstract_device=of.abstract_device
    )
    with tracing(mesh):
        model = Model(c.model)
    return Step(c, model, mesh, step.spec, step.name, plain_sums=real.plain_sums, like=real)


def _dims(real: Step, small: Step) -> dict[str, tuple[int, int]]:
    """Pairs the sizes of two steps by name."""
    pairs: dict[str, tuple[int, int]] = {}
    models = real.config.model, small.config.model
    trainings = real.config.training, small.config.training
    names = {field.name for field in dataclasses.fields(models[0])}
    sized = getattr(models[0], "dims", {})
    names |= {*sized.values(), "heads"}
    again = [(dim, name) for dim, name in sized.items() if [*sized.values()].count(name) > 1]
    for parts, of in (
        (models, names),
        (trainings, ("batch_size", "seq_len", "loss_chunk", "microbatches")),
    ):
        for name in of:
            a, b = (getattr(part, name, None) for part in parts)
            if type(a) is int and type(b) is int:
                pairs[name] = a, b
    if "d_head" in pairs:
        a, b = pairs["d_head"]
        pairs["half a head"] = a // 2, b // 2
    steps = real, small
    a, b = map(slots_of, steps)
    if a and b:
        pairs["slots"] = a, b
    pairs["block"] = _block(real), _block(small)
    a, b = (step.config.training.batch_size // step.config.training.microbatches for step in steps)
    pairs["rows"] = a, b
    a, b = (step.config.training.seq_len // _block(step) for step in steps)
    pairs["blocks"] = a, b
    a, b = (t.seq_len // (t.loss_chunk or t.seq_len) for t in trainings)
    pairs["chunks"] = a, b
    # a setting may be the size of several dims, as of a square matrix
    pairs |= {dim: pairs[name] for dim, name in again if name in pairs}
    return {name: (a, b) for name, (a, b) in pairs.items() if a > 0 and b > 0}


# ---- arguments -----------------------------------------------------------------------------------


NOT_FINITE = 3
"""The seed of a draw with NaN in each weight."""
INTERVAL = 252_000
"""Steps of a multiple of most intervals that people choose: 2 to 10, 16, 24, 30, 32, 50, 60, 100,
500, 1,000."""


def draw(step: Step, seed: int) -> list[Any]:
    """Draws whole arguments of a program of a step.

    There are several documents, targets that do not count, repeated ids, the first and the last id,
    and moments of Adam of the size that they have. Seed 1 has a batch of one document for each
    sequence and small weights, whose gradient is not clipped; seed 2 a batch without targets;
    NOT_FINITE has NaN in each weight, so the step is skipped.

    Returns:
        An array for each argument of the jaxpr, with layers in layer order.
    """
    rng = np.random.default_rng(seed)
    vocab = step.config.model.vocab
    warmup = step.config.optimizer.warmup_steps
    end = step.config.optimizer.schedule_steps or step.config.training.steps or warmup + 1
    # The first step; one after warmup; the last of an interval, so late that averages have all
    # their steps.
    later = (warmup + end) // 2
    number = (0, later, (end // INTERVAL + 64) * INTERVAL - 1, later | 1)[seed]

    def of(path: str, aval: Any) -> Any:
        if is_key(aval.dtype):
            with without_mesh():
                return jax.random.key(seed)
        dtype = np.dtype(aval.dtype)
        if dtype.kind == "b":
            if "is_seq_start" in path:
                starts = rng.random(aval.shape) < (0.2, 0.0, 0.4)[seed % 3]
                starts[..., aval.shape[-1] // 2] |= seed % 3 != 1
                return starts
            if "loss_mask" in path and seed % 3 == 2:
                return np.zeros(aval.shape, bool)
            return rng.random(aval.shape) < 0.8
        if dtype.kind in "iu":
            if aval.shape == ():
                return np.asarray(number, dtype)
            ids = rng.integers(0, vocab, aval.shape)
            repeated = rng.choice([0, vocab - 1, vocab // 2], aval.shape)
            return np.where(rng.random(aval.shape) < 0.3, repeated, ids).astype(dtype)
        if "learning_rate" in path or "weight_decay" in path:
            return np.asarray(2.0**-7, dtype)
        if "elapsed" in path:
            return np.asarray(min(number / end, 2), dtype)
        x = rng.standard_normal(aval.shape).astype(np.float32)
        scale = {"nu": np.abs(x) * 1e-4, "mu": x * np.float32(1e-2)}
        named = [scaled for name, scaled in scale.items() if f"adam_{name}" in path]
        if named:
            return named[0]
        x = x * np.float32(0.3) if len(aval.shape) > 1 else 1 + np.float32(0.3) * x
        if seed == 1:
            return x * np.float32(2**-6)
        if seed == NOT_FINITE:
            x.flat[:1] = np.nan
        return x

    pairs = jax.tree_util.tree_leaves_with_path(step.traced.args_info)
    return [
        of(jax.tree_util.keystr(path), aval)
        for (path, _), aval in zip(pairs, step.jaxpr.in_avals, strict=True)
    ]
