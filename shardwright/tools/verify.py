"""Checks a step on every mesh: in exact arithmetic, and as it is compiled, on simulated devices.

    python -m tools.verify --config-name=local_test_synthetic verify.small=true
    python -m tools.verify --config-name=gpt2_124m verify.compiled=false verify.devices=2048
    training.batch_size=8192

Takes the configuration of a run, as `python -m train` does, and your train.py and model as they are
on disk. docs/parallelism.md explains the report. Exit status 1: the step is rejected, or the meshes
differ.
"""

import itertools
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardwright.axes import AXES, axes_of_mesh, mesh_text
from shardwright.cluster.devices import explicit_mesh
from shardwright.data.checks import within
from shardwright.inspect.fresh import reimport
from shardwright.inspect.smaller import NOT_FINITE, draw
from shardwright.inspect.soundness import SEEDS, examine
from shardwright.modeling.kernel_checks import TOLERANCE
from shardwright.modeling.model import load_model
from shardwright.program.config import Config, check_divides
from shardwright.program.stages import placement_of, training_table
from shardwright.program.step import NAMES, open_steps, trace_step
from shardwright.run.launch import start_with_section
from shardwright.settings.output import say

Mesh = Mapping[str, int]
ONE_DEVICE = dict.fromkeys(AXES, 1)
# largest difference that counts as rounding, relative to the largest entry of a tensor
LIMIT = TOLERANCE["f32"]
PLANTED = "inputs with NaN in the weights"


@dataclass
class VerifyConfig:
    """The section `verify`."""

    devices: int = within(2, 4097, 8)
    """Number of simulated devices, at least 2. The step is checked on all meshes of this many
    devices."""
    meshes: list[str] | None = None
    """Meshes to check: [1x4x2,2x2x1x2], as devices along r, d and t, or p, r, d and t; or [e2c2t2]
    by axis, in any order. Null: all, with the axes e and c where the run's mesh has them."""
    small: bool = False
    """Shrinks model and batch to sizes that every mesh divides; layers then suit mesh.p stages, or
    2 and 4 stages."""
    compiled: bool = True
    """Also compiles the step, and compares its results with one device. false: no devices are
    needed."""


def all_meshes(
    c: Config, devices: int, names: list[str] | None = None
) -> tuple[list[Mesh], list[tuple[Mesh, str]]]:
    """Returns the meshes of this many devices that divide the step's sizes, and the others, each
    with the reason.

    `names` select some, as VerifyConfig.meshes. Raises ValueError for an unknown name.
    """
    counts = itertools.product(
        [n for n in range(1, devices + 1) if devices % n == 0], repeat=len(AXES)
    )
    meshes = [
        dict(zip(AXES, sizes, strict=True)) for sizes in counts if math.prod(sizes) == devices
    ]
    known = {
        "x".join(map(str, axes_of_mesh(x).values())): x for x in meshes if x["e"] == x["c"] == 1
    }
    by_axis = {
        frozenset(f"{axis}{n}" for axis, n in mesh.items() if n > 1): mesh for mesh in meshes
    }
    named = {
        name: known.get(name, by_axis.get(frozenset(re.findall(r"[a-z]\d+|.", name))))
        for name in names or ()
    }
    if unknown := [name for name, mesh in named.items() if mesh is None]:
        raise ValueError(
            f"verify.meshes has {min(unknown)}; name a mesh of {devices} devices, such as "
            f"{', '.join([*known][:3])} (p if it is not 1, r, d, t), or by axis, such as "
            f"c{devices}."
        )
    chosen = [
        mesh
        for mesh in meshes
        if all(mesh[axis] == 1 or getattr(c.mesh, axis) != 1 for axis in "ec")
    ]
    fit, others = [], []
    for mesh in chosen if names is None else filter(None, named.values()):
        try:
            check_divides(c, mesh)
            with jax.sharding.use_abstract_mesh(explicit_mesh(axes_of_mesh(mesh))):
                training_table(c, load_model(c.model))
            fit.append(mesh)
        except ValueError as error:
            others.append((mesh, str(error)))
    return fit, others


def small(c: Config, n: int) -> None:
    """Shrinks `c` to sizes that all meshes of n devices divide, and that all differ, so that
    swapped dims are found.
    """
    t = c.training
    p = c.mesh.p if c.mesh.p > 1 else next(p for p in (4, 3, 2, 1) if n % p == 0)
    names = {f.name for f in fields(c.model)}
    sizes = {
        "layers": max(2, p * c.pipeline.virtual_stages),
        "d_ff": 10 * n,
        "vocab": 14 * n,
        "positions": 4 * n,
    }
    sizes |= {
        "experts": 2 * n,
        "n_kv": n,
        "n_q_per_kv": 2,
        "d_head": 2 * n,
        "heads": n,
        "bos_id": 0,
    }
    # the width of a head is d_model / heads
    sizes["d_model"] = 2 * n * n if "heads" in names else 6 * n
    for name in names & sizes.keys():
        setattr(c.model, name, sizes[name])
    t.microbatches = max(p, 2)
    t.batch_size = n * t.microbatches
    t.seq_len = 4 * n
    t.loss_chunk = None if t.loss_chunk is None else n


def on_host(x: jax.Array) -> np.ndarray:
    """Returns an array as f64, with NaN where devices have different copies of a block."""
    found = np.array(x, np.float64)
    for shard in x.addressable_shards:
        if np.asarray(shard.data).tobytes() != np.asarray(x)[shard.index].tobytes():
            found[shard.index] = np.nan
    return found


def results_on(c: Config, sizes: Mesh) -> dict[str, np.ndarray]:
    """Compiles the programs of a step on a mesh, runs them on drawn inputs, and returns what they
    compute, by name.

    Layers are in layer order. The last inputs of training and evaluation have NaN in each weight.
    """
    found = {}
    mesh = explicit_mesh(axes_of_mesh(sizes), jax.devices()[: math.prod(sizes.values())])
    with jax.set_mesh(mesh), reimport(trace_step(c, load_model(c.model))) as of_mesh:
        order = placement_of(c, of_mesh.model).order
        back = None if order is None else np.argsort(order)
        for step in (of_mesh.other(name=name) for name in NAMES):
            program = step.lowered.compile()
            info, structure = jax.tree_util.tree_flatten_with_path(step.traced.args_info)
            seeds = {*SEEDS[step.name], *([NOT_FINITE] if step.name != "start" else [])}
            given = {
                PLANTED if seed == NOT_FINITE else f"inputs {seed}": draw(step, seed)
                for seed in seeds
            }
            for inputs, args in given.items():
                for i, ((path, _), aval) in enumerate(zip(info, step.jaxpr.in_avals, strict=True)):
                    x = reordered(args[i], jax.tree_util.keystr(path), order)
                    args[i] = jax.device_put(x, NamedSharding(mesh, aval.sharding.spec))
                args, options = jax.tree.unflatten(structure, args)
                for path, x in jax.tree_util.tree_leaves_with_path(program(*args, **options)):
                    name = f"{step.name} {jax.tree_util.keystr(path)} for {inputs}"
                    found[name] = reordered(on_host(x), name, back)
    return found


def reordered(x: np.ndarray, path: str, rows: np.ndarray | None) -> np.ndarray:
    """Returns a stack of layers in another order, and any other array as it is."""
    return x if rows is None or ".layers." not in path else x[rows]


def error_of(found: np.ndarray, exact: np.ndarray) -> float:
    """Returns the largest difference relative to the largest entry; inf if not the same entries are
    finite.
    """
    finite = np.isfinite(exact)
    if np.any(np.isfinite(found) != finite):
        return math.inf
    found, exact = found[finite], exact[finite]
    return float(
        np.max(np.abs(found - exact), initial=0.0) / (np.max(np.abs(exact), initial=0.0) or 1.0)
    )


def job(c: Config, settings: VerifyConfig) -> None:
    """Verifies `c` and prints the report.

    Exits with status 1 if meshes differ; raises ValueError if it is rejected.
    """
    if settings.small:
        small(c, settings.devices)
        # several blocks even for these short sequences
        c.training.attention_block = c.training.seq_len // 4
    c.training.compute_dtype, c.training.fp8 = "f32", False
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", settings.devices if settings.compiled else 1)
    meshes, others = all_meshes(c, settings.devices, settings.meshes)
    if not meshes:
        advice = "Give verify.small=true for sizes that all meshes divide."
        raise ValueError(
            f"no mesh of {settings.devices} devices divides the model: {others[0][1]} {advice}"
        )
    expected = results_on(c, ONE_DEVICE) if settings.compiled else {}
    if bad := [
        name for name, x in expected.items() if PLANTED not in name and not np.all(np.isfinite(x))
    ]:
        raise ValueError(f"the {bad[0]} is not finite on one device. Correct the step there first.")
    lines = [f"{mesh_text(mesh)}: {reason}" for mesh, reason in others]
    differ = 0
    for sizes in meshes:
        verdict = examine(open_steps(c, sizes)[0])
        found = [f"DIFFERS on {mesh_text(sizes)}: {finding}" for finding in verdict.found]
        results = results_on(c, sizes).items() if settings.compiled and not found else ()
        errors = sorted(((error_of(x, expected[name]), name) for name, x in results), reverse=True)
        text = f"{mesh_text(sizes)}: in exact arithmetic as on one device"
        if errors:
            text += (
                f"; compiled, {len(errors)} tensors differ by {errors[0][0]:.1e} at most, the "
                f"{errors[0][1]}"
            )
            found = [f"DIFFERS on {text} (limit {LIMIT:.0e})"] if errors[0][0] > LIMIT else []
        for line in found or [text]:
            say(line)
        lines += [f"not decided: {line}" for line in verdict.undecided]
        differ += bool(found)
    for line in dict.fromkeys(lines):
        say(line)
    say(
        f"{differ} of {len(meshes)} meshes DIFFER."
        if differ
        else f"All {len(meshes)} meshes agree with one device."
    )
    sys.exit(bool(differ))


@dataclass
class VerifiedConfig(Config):
    """All settings of a run, and the section `verify`."""

    verify: VerifyConfig = field(default_factory=VerifyConfig)


if __name__ == "__main__":
    start_with_section("verify", VerifiedConfig, job, __doc__ or "")
