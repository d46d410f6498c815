"""Checks that training is the same on every mesh: compares a step on simulated devices with one device.

    python -m tools.verify --config-name=local_test_synthetic verify.small=true
    python -m tools.verify --config-name=local_gpt2 verify.devices=4 model.d_model=64 training.batch_size=8
    python -m tools.verify --config-name=gpt2_124m verify.only_types=true verify.devices=2048 training.batch_size=8192

Takes the configuration of a run, as `python -m train` does, and train.py and the model's module from disk.
docs/parallelism.md explains the report. Exit status 1: the step is refused, or the meshes differ.
"""

import dataclasses
import math
import os
import sys
from dataclasses import dataclass, field

import jax

from shardlib.axes import mesh_text
from shardwright.run.config import Config
from shardwright.run.launch import start_with_section
from shardwright.settings.words import say
from shardwright_data.checks import within
from tools.verify.compare import compare_meshes
from tools.verify.meshes import all_meshes, some_of
from tools.verify.step import type_check


@dataclass
class VerifyConfig:
    """The section `verify`."""

    devices: int = within(2, 4097, 8)
    """Number of simulated devices, at least 2. Every mesh of that many runs."""
    meshes: list[str] | None = None
    """Meshes to run: [1x4x2,2x2x1x2] as devices along r, d and t, or p, r, d and t; or [e2c2t2] by axis, in any order.
    Null: all, with the axes e and c where the run's mesh has them."""
    small: bool = False
    """Makes the model and the batch small, at sizes that every mesh divides. Layers and microbatches are then for
    mesh.p stages, or, if mesh.p is 1, for 2 and 4."""
    only_types: bool = False
    """Only traces the step, which checks its types, on `meshes` or some of all, without devices. Nothing is computed or
    compared."""


def small(c: Config, devices: int) -> None:
    """Makes `c` small: sizes that all meshes of `devices` divide, all different, so that no dim passes for another.

    Layers and microbatches are for the stages of the configuration, or, if it has none, for up to 4; at least two
    microbatches. Other sizes of a model than those below stay.
    """
    n, t = devices, c.training
    p = c.mesh.p if c.mesh.p > 1 else next(p for p in (4, 3, 2, 1) if n % p == 0)
    fields = {f.name for f in dataclasses.fields(c.model)}
    sizes = {"layers": max(2, p * c.pipeline.virtual_stages), "d_ff": 10 * n, "vocab": 14 * n, "positions": 4 * n}
    sizes |= {"experts": 2 * n, "n_kv": n, "n_q_per_kv": 2, "d_head": 2 * n, "heads": n, "bos_id": 0}
    sizes["d_model"] = 2 * n * n if "heads" in fields else 6 * n  # the width of a head is d_model / heads
    for name in fields & sizes.keys():
        setattr(c.model, name, sizes[name])
    groups = 1 if t.microbatches == t.side_by_side > 1 else 2
    t.microbatches = max(p, groups) if t.side_by_side == 1 else math.lcm(p, groups * t.side_by_side)
    t.side_by_side = t.microbatches if groups == 1 else t.side_by_side
    t.batch_size, t.seq_len = n * t.microbatches, 4 * n
    t.loss_chunk = None if t.loss_chunk is None else n


def simulate(devices: int) -> None:
    """Has JAX simulate so many devices. Before anything runs on one."""
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} "
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # most of the time is compilation
    )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def job(c: Config, settings: VerifyConfig) -> None:
    """Verifies `c` and prints the report. Ends with status 1 if meshes differ; raises ValueError on a refusal."""
    if settings.small:
        small(c, settings.devices)
    simulate(1 if settings.only_types else settings.devices)
    meshes, others = all_meshes(c, settings.devices, settings.meshes)
    if not meshes:
        raise ValueError(
            f"no mesh of {settings.devices} devices divides the model: {others[0][1]} verify.small=true has sizes that "
            "all meshes divide."
        )
    if settings.only_types:
        for mesh, reason in others:
            say(f"{mesh_text(mesh)}: {reason}")
        traced = meshes if settings.meshes else some_of(meshes)
        for mesh in traced:
            type_check(c, mesh)
            say(f"{mesh_text(mesh)}: type-checks")
        if more := len(meshes) - len(traced):
            say(f"{more} more divide the sizes, with the same axes and sizes in other combinations: see verify.meshes.")
        say(f"The step type-checks on {len(traced)} of {len(meshes) + len(others)} meshes; no device was used.")
        return
    if settings.small:  # several blocks even for these sequences
        c.training.attention_block = c.training.seq_len // 4
    largest, differing = compare_meshes(c, meshes, lambda text: print(text, file=sys.stderr))
    t = c.training
    say(f"training.microbatches={t.microbatches} attention={t.attention} fp8={str(t.fp8).lower()}")
    for line in [largest, *differing]:
        say(line)
    say("The meshes DIFFER." if differing else f"In f64, all {len(meshes)} meshes agree with one device.")
    if differing:
        sys.exit(1)


@dataclass
class VerifiedConfig(Config):
    """All settings of a run, and the section `verify`."""

    verify: VerifyConfig = field(default_factory=VerifyConfig)


if __name__ == "__main__":
    start_with_section("verify", VerifiedConfig, job, __doc__ or "")
