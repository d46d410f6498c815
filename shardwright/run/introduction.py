"""Prints the lines that describe a run at its start, and collects facts for its report page."""

import itertools
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from shardwright.axes import mesh_text
from shardwright.cluster.devices import known_options
from shardwright.data.loader import Loader
from shardwright.modeling.attention_calls import describe_attention, path_of
from shardwright.program.best_effort import best_effort
from shardwright.program.changes import MOST_STEPS, tokens_before
from shardwright.program.config import Config
from shardwright.program.differences import flat
from shardwright.program.files import write_whole
from shardwright.program.flops import Speed, parameters_of
from shardwright.program.printing import log
from shardwright.program.processes import in_all_processes
from shardwright.program.saved_config import with_defaults
from shardwright.program.stages import describe_stages
from shardwright.settings.output import listed


def introduce(
    run: Any, directory: Path, planned: str | None, source_differs: str | None
) -> dict[str, Any]:
    """Prints the directory, devices, model, data, plan, attention, stages and changes of a run.

    Returns the compiler options that the installed XLA knows. Raises ValueError for invalid
    settings.
    """
    # Before the first printed line, because these may raise.
    attention = describe_attention(run.step)
    described = describe_stages(run.config, run.model)
    check_deterministic(run.config, [path_of(run.step.forward, call) for call in run.step.calls])
    reads = jax.process_index() == 0 and not run.is_over
    of_data = in_all_processes(lambda: describe_data(run) if reads else [])
    options = known_options(run.config.hardware.options, log)
    _print_start(run, directory)
    lines = [*of_data, planned, source_differs and f"source     {source_differs}"]
    lines += [*(f"attention  {x}" for x in attention), *(f"pipeline   {x}" for x in described)]
    lines += [f"after step {first}: {changed}" for first, changed in run.changes().items()]
    for line in filter(None, lines):
        log(line)
    return options


def check_deterministic(c: Config, paths: list[str]) -> None:
    """Raises ValueError if hardware.deterministic is set and `paths`, the attention of the layers,
    rule it out.
    """
    copies = c.training.unroll != 1 or len(paths) > 1 or c.mesh.p != 1
    if c.hardware.deterministic and copies and "cudnn" in paths:
        raise ValueError(
            "hardware.deterministic=true with several calls of cuDNN attention in one program, "
            "which XLA compiles but cannot run (openxla/xla #46500). Set training.attention=triton "
            "or blockwise or, with mesh.p=1 and layers of one kind, training.unroll=1."
        )


def _print_start(run: Any, directory: Path) -> None:
    mesh = jax.sharding.get_mesh()
    data = run.config.data
    t = run.config.training
    loader = run.loader
    name = data.filespec or " + ".join(data.mixture) or "stream"
    length = f"{loader.num_tokens:,}" if loader.num_tokens is not None else "unknown number of"
    fp8 = ", weight matmuls in fp8" * t.fp8
    log(f"run        {directory}" + (f", resumed after {run.start} steps" if run.start else ""))
    log(
        f"devices    {mesh.size} x {mesh.devices.flat[0].device_kind}: mesh {mesh_text(mesh.shape)}"
    )
    summed = t.compute_dtype if t.reduce_dtype == "compute" else t.reduce_dtype
    over = ", ".join(axis for axis in "cde" if mesh.shape.get(axis, 1) > 1)
    reduced = f", gradients reduced over {over} in {summed}" if over else ""
    log(
        f"model      {parameters_of(run.model):,} parameters, {t.compute_dtype} "
        f"compute{fp8}{reduced}"
    )
    steps = f"{run.total:,} steps" if t.minutes is None else f"{t.minutes:g} minutes of steps"
    log(f"data       {name}: {length} tokens; {steps} of {loader.tokens_per_batch:,}")
    for line in (*loader.files, *(run.validation.files if run.validation else ())):
        log(f"files      {line}")


def describe_data(run: Any) -> list[str]:
    """Describes which positions are targets, and how often each source is read, for the start of a
    run.

    Raises ValueError if no sequence has a target.
    """
    data = run.config.data
    t = run.config.training
    lines = []
    kind = "sequence" if data.sequence_packing else "document"
    if (counts := run.loader.count_targets()) is not None and (
        share := counts.mean() / t.seq_len
    ) < 1:
        if share == 0:
            raise ValueError(
                f"none of the first {counts.size:,} {kind}s of the data has a target in "
                f"{t.seq_len} tokens. Raise training.seq_len, or check that "
                f"data.loss_mask={data.loss_mask} names the right input."
            )
        without = int((counts == 0).sum())
        none = f", and {without:,} of them have none" if without else ""
        lines.append(
            f"targets    {in_percent(share)} of positions in the first {counts.size:,} "
            f"{kind}s{none}"
        )
    if (
        data.loss_mask is not None
        and run.validation
        and not has_targets(run.validation, t.eval_batches)
    ):
        lines.append(
            "WARNING    no target in the batches of validation, so it gives no loss "
            "(data.loss_mask)"
        )
    if data.mixture or any(number > 1 for number in run.passes.values()):
        most_first = sorted(run.passes.items(), key=lambda item: -item[1])
        passes = [f"{name} {float(number):.3g}x" for name, number in most_first]
        lines.append(f"passes     {listed(passes, 5)} in this run")
    return lines


def in_percent(share: float) -> str:
    """Formats a share as a percentage."""
    return f"{100 * share:.3g}%"


def has_targets(loader: Loader, batches: int) -> bool:
    """Returns True if any batch that `evaluate` reads, of at most `batches`, has a target."""
    steps = itertools.takewhile(loader.rows, range(batches))
    return any(loader.sequences(i, np.arange(loader.rows(i))).loss_mask.any() for i in steps)


def save_config(directory: Path, config: object) -> None:
    """Writes the settings of a run, a dataclass, to config.yaml, on process 0 only."""
    if jax.process_index() == 0:
        with best_effort(str(directory / "config.yaml")):
            write_whole(directory / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))


def facts_of(run: Any, speed: Speed) -> dict[str, Any]:
    """Collects facts about this start of a run for provenance.json, which the report page shows."""
    mesh = jax.sharding.get_mesh()
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    module = run.config.model.module
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "overrides": list(hydra.overrides.task) if hydra else None,
        "defaults": flat(with_defaults({"model": {"module": module}}, module)),
        "run": {
            "total_steps": run.total if run.total < MOST_STEPS else None,
            "parameters": parameters_of(run.model),
            "tokens": tokens_before(run.whole, run.total) if run.total < MOST_STEPS else None,
            "passes": {name: float(number) for name, number in run.passes.items()},
            "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
            "mesh": dict(mesh.shape),
            "flops_per_token": f"{speed.flops / 1e6:,.2f} MFLOP, counting pairs that attention "
            f"computes (all pairs: {speed.of_all_pairs / 1e6:,.2f} MFLOP, "
            f"{speed.of_all_pairs / speed.flops:.4g} times the MFU)",
            "peak_source": speed.peak.source,
        },
    }
