"""Checks that training is the same on every mesh: compares a step on simulated devices with one device.

    python -m tools.verify --config-name=local_test_synthetic verify.small=true
    python -m tools.verify --config-name=local_gpt2 verify.devices=4 model.d_model=64 training.batch_size=8
    python -m tools.verify --config-name=gpt2_124m verify.only_types=true verify.devices=2048 training.batch_size=8192

Takes the configuration of a run, as `python -m train` does, and your train.py and model as they are on disk.
docs/parallelism.md explains the report. Exit status 1: the step is rejected, or the meshes differ.
"""

import dataclasses
import math
import os
import sys
from dataclasses import dataclass, field

import jax

from shardlib.axes import mesh_text
from shardwright.data.checks import within
from shardwright.run.config import Config
from shardwright.run.launch import start_with_section
from shardwright.settings.words import say
from shardwright.tools.verify.compare import compare_meshes
from shardwright.tools.verify.meshes import all_meshes, some_of
from shardwright.tools.verify.step import type_check


@dataclass
class VerifyConfig:
    """The section `verify`."""

    devices: int = within(2, 4097, 8)
    """Number of simulated devices, at least 2. All meshes of this many devices run."""
    meshes: list[str] | None = None
    """Meshes to run: [1x4x2,2x2x1x2] as devices along r, d and t, or p, r, d and t; or [e2c2t2] by axis, in any order.
    Null: all, with the axes e and c where the run's mesh has them."""
    small: bool = False
    """Shrinks model and batch to sizes that every mesh divides. Layers and microbatches then suit mesh.p stages, or, if
    mesh.p is 1, 2 and 4 stages."""
    only_types: bool = False
    """Only traces the step, which checks its types, without devices, on `meshes` or a sample of all meshes."""


def small(c: Config, devices: int) -> None:
    """Shrinks `c` to sizes that all meshes of `devices` divide, and that all differ, so that swapped dims are found.

    Layers and microbatches suit the stages of the configuration, or, if it has none, up to 4 stages; there are at least
    two microbatches. Sizes of a model that are not listed below stay the same.
    """
    n = devices
    t = c.training
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
    t.batch_size = n * t.microbatches
    t.seq_len = 4 * n
    t.loss_chunk = None if t.loss_chunk is None else n


def simulate(devices: int) -> None:
    """Makes JAX simulate this many devices. Call it before anything runs on a device."""
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} "
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # most time is compilation
    )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def job(c: Config, settings: VerifyConfig) -> None:
    """Verifies `c` and prints the report. Exits with status 1 if meshes differ; raises ValueError if it is rejected."""
    if settings.small:
        small(c, settings.devices)
    simulate(1 if settings.only_types else settings.devices)
    meshes, others = all_meshes(c, settings.devices, settings.meshes)
    if not meshes:
        raise ValueError(
            f"no mesh of {settings.devices} devices divides the model: {others[0][1]} Give verify.small=true for sizes "
            "that all meshes divide."
        )
    if settings.only_types:
        for mesh, reason in others:
            say(f"{mesh_text(mesh)}: {reason}")
        traced = meshes if settings.meshes else some_of(meshes)
        for mesh in traced:
            type_check(c, mesh)
            say(f"{mesh_text(mesh)}: type-checks")
        if more := len(meshes) - len(traced):
            say(f"{more} more meshes fit, with the same axes and sizes combined differently: see verify.meshes.")
        say(f"The step type-checks on {len(traced)} of {len(meshes) + len(others)} meshes; no device was used.")
        return
    if settings.small:  # several blocks even for these short sequences
        c.training.attention_block = c.training.seq_len // 4
    largest, differing = compare_meshes(c, meshes, lambda text: print(text, file=sys.stderr))
    t = c.training
    say(f"training.microbatches={t.microbatches} attention={t.attention} fp8={str(t.fp8).lower()}")
    for line in [largest, *differing]:
        say(line)
    agree = f"all {len(meshes)} meshes agree" if len(meshes) > 1 else "the mesh agrees"
    say("The meshes DIFFER." if differing else f"In f64, {agree} with one device.")
    if differing:
        sys.exit(1)


@dataclass
class VerifiedConfig(Config):
    """All settings of a run, and the section `verify`."""

    verify: VerifyConfig = field(default_factory=VerifyConfig)


if __name__ == "__main__":
    start_with_section("verify", VerifiedConfig, job, __doc__ or "")
