"""Records the source of a run in its directory and checkpoints, and compares it when the run is
used again.

    <run>/source/<step>/    for each start of the run that did a step, named by the number of steps
    done before
        train.py, <module>.py   as they ran, and modules that are not of this project
        source.zip              the project's source
        provenance.json         commit, versions of all packages, command line, environment, hashes,
        facts of the run

The training step and the evaluation step are compared by hashes. Each step is traced on one device,
and the hash is that of its lowered text, so comments and variable names do not matter.
"""

import dataclasses
import importlib.metadata
import inspect
import itertools
import json
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from shardwright.cluster.devices import Device, make_mesh
from shardwright.program.best_effort import best_effort, in_a_line
from shardwright.program.config import PipelineConfig
from shardwright.program.files import write_whole
from shardwright.program.source import (
    ROOT,
    TRAIN,
    bytes_of,
    files_of_project,
    own_modules,
    source_of,
)
from shardwright.program.step import Step
from shardwright.settings.output import listed

_PLAIN = {
    "training.microbatches": 2,
    "training.batch_size": 4,  # a loss of pairs needs two sequences in a microbatch
    "training.gather_weights": "layer",
    "training.attention": "einsum",
    "training.save": "marked",
    "training.unroll": 1,
    "training.loss_chunk": None,
    "training.minutes": None,
    **{f"pipeline.{name}": value for name, value in dataclasses.asdict(PipelineConfig()).items()},
}
"""Values, in the compared programs, of settings that may change when a run resumes."""
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_")
"""Prefixes of the environment variables that provenance.json keeps. Others may be secrets."""


def _device() -> Device:
    """Returns the device to trace for: a CPU if JAX has one, because a run may resume on other
    devices.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return jax.local_devices()[0]


def plain(step: Step, name: str) -> Step:
    """The program of this name on one device, without settings that may change on resuming."""
    return step.other(_PLAIN, name=name, mesh=make_mesh([_device()]))


def provenance_of(
    step: Step, which: tuple[str, ...] = ("training", "evaluation")
) -> dict[str, Any]:
    """Makes the provenance for a checkpoint: hashes of the source and of the plain programs, and
    what traced them.

    The plain programs are for one device, without settings that may change on resuming. A program
    that cannot be traced has no hash, and `untraced` is the reason.

    Args:
        step: the training step.
        which: names of the programs, from step.NAMES.
    """
    hashes: dict[str, str] = {}
    untraced: dict[str, str] = {}
    for name in which:
        try:
            hashes[name] = plain(step, name).hash
        except Exception as error:  # the model may need more devices, sequences or microbatches
            untraced[name] = in_a_line(error)
    found = {"programs": hashes} | ({"untraced": [*untraced.values()][-1]} if untraced else {})
    traced_by = (
        f"jax {jax.__version__}, lowered for {_device().platform}, two sequences a microbatch"
    )
    return {**found, "source": source_of(), "traced_by": traced_by}


def compare_source(
    saved: dict[str, Any] | None, now: dict[str, Any], which: tuple[str, ...], allow: str | None
) -> str | None:
    """Describes how the source differs from that of a checkpoint; None if it does not, or if that
    is not known.

    Args:
        saved: what provenance_of returned for the checkpoint; None in imported checkpoints.
        now: what it returns for this run.
        which: names of the programs that must be the same.
        allow: the setting that allows other programs, for the message; None if it is set.

    Raises:
        ValueError: the source computes something else.
    """
    if saved is None:
        return None
    names = sorted({name for name, _ in set(saved["source"].items()) ^ set(now["source"].items())})
    differs = f"{listed(names, 5)}: the source differs from that of the checkpoint"
    if saved["traced_by"] != now["traced_by"] or not {*which} <= {*saved["programs"]} & {
        *now["programs"]
    }:
        untraced = saved["traced_by"] == now["traced_by"] and (
            now.get("untraced") or saved.get("untraced")
        )
        why = untraced or f"the checkpoint was traced by {saved['traced_by']}"
        return f"{differs}; cannot tell if it computes the same: {why}" if names else None
    others = [name for name in which if saved["programs"][name] != now["programs"][name]]
    if not others:
        return f"{differs}; it computes the same in {' and '.join(which)}" if names else None
    differs = (
        differs
        if names
        else "settings, packages or modules that are not compared changed the program"
    )
    found = f"{differs}, and it computes something else in {' and '.join(others)}"
    if allow is not None:
        raise ValueError(
            f"{found}. Use the source kept in the run's directory (source/), or give {allow} to "
            "continue with this one."
        )
    return found


def keep_source(directory: Path, step: int, model: object, about: Mapping[str, Any]) -> None:
    """Writes <directory>/source/<step>, on process 0 only. Its provenance.json includes `about`."""
    if jax.process_index() != 0:
        return
    kept = directory / "source" / f"{step:010}"
    packages = [found.metadata for found in importlib.metadata.distributions()]
    own = [path.parent for path in (Path(inspect.getsourcefile(type(model)) or ""), *own_modules())]
    projects = [path for path in [*own, Path.cwd()] if not path.resolve().is_relative_to(ROOT)]
    found = {
        "commit": _commit(ROOT),
        "project_commit": next(filter(None, map(_commit, projects)), None),
        "command": sys.orig_argv,
        "python": platform.python_version(),
        "packages": dict(
            sorted({about["Name"]: about["Version"] for about in packages if about["Name"]}.items())
        ),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(ENVIRONMENT)},
    }
    with best_effort(str(kept)):
        kept.mkdir(parents=True, exist_ok=True)
        names = set()
        of_model = Path(inspect.getsourcefile(type(model)) or "")
        for path in dict.fromkeys([TRAIN, of_model, *own_modules()]):
            (kept / (f"{path.parent.name}__" * (path.name in names) + path.name)).write_bytes(
                bytes_of(path)
            )
            names.add(path.name)
        with zipfile.ZipFile(
            kept / "source.zip", "w", zipfile.ZIP_DEFLATED, strict_timestamps=False
        ) as archive:
            for path in itertools.chain(*files_of_project().values()):
                archive.writestr(str(path.relative_to(ROOT)), bytes_of(path))
        write_whole(
            kept / "provenance.json", json.dumps({**found, **about}, indent=1, default=str) + "\n"
        )


def _commit(folder: Path) -> str | None:
    """Returns the commit of the repository that a folder is in; None without git or a
    repository.
    """
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
