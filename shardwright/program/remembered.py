"""Remembers what was found out about the programs of a step, beside JAX's compilation cache.

A warm start compiles nothing, and would spend most of its time on tracing and checking programs
that have not changed.
"""

import contextlib
import datetime
import hashlib
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax

from shardwright.data.untrusted import parse_json, read_text
from shardwright.program.best_effort import best_effort
from shardwright.program.files import write_whole
from shardwright.program.provenance import plain
from shardwright.program.source import source_of
from shardwright.program.step import NAMES, Step, with_settings

_LARGEST = 2**22


def remembered(
    step: Step, what: str, find: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], str]:
    """Returns what `find` returns, and the day on which it found this; "" if it did now.

    An earlier run of a sweep that shares the step found it, or it is read from the folder of JAX's
    compilation cache, if there is one, where an earlier start with the same identity wrote it.
    Nothing is written if `find` raises.

    Args:
        step: the step that it is about.
        what: names what is found, which depends on the step alone.
        find: returns it, as JSON can hold it.
    """
    day = datetime.date.today().isoformat()
    if what in step.kept:
        return step.kept[what], day
    folder = cast(Any, jax.config).jax_compilation_cache_dir
    try:
        identity = _identity(step) if folder and "://" not in folder else ""
    except Exception:  # a program that cannot be traced: `find` says why
        identity = ""
    path = Path(folder, "checked", f"{identity}_{what}.json") if identity else None
    if path:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            entry = parse_json(read_text(path, _LARGEST))
            step.kept[what] = dict(entry["found"])
            return step.kept[what], str(entry["day"])
    step.kept[what] = found = find()
    if path and jax.process_index() == 0:
        with best_effort(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"day": day, "found": found}))
    return found, ""


def _identity(step: Step) -> str:
    """Hash of all that decides what is found out about the programs of a step.

    These are the programs as lowered for its mesh and, in their plainest form, for one device; the
    source of this project and of the user's own modules; the settings without seeds and Numbers;
    and the versions of the installed packages.
    """
    programs = [step.other(name=name) for name in NAMES]
    c = with_settings(step.config, {"training.seed": 0, "data.seed": 0})
    if all(program.is_shared for program in programs):
        c = with_settings(c, {"optimizer.learning_rate": 0, "optimizer.weight_decay": 0})
    sections = (c.model, c.optimizer, c.data, c.training, c.pipeline)
    facts = [step.mesh.shape, step.spec.module, type(step.model), sections]
    facts += [sorted(source_of().items()), platform.python_version(), sorted(_installed())]
    # one device is what the mesh is compared with, and its program may have changed alone
    programs += [plain(step, name) for name in ("training", "evaluation")]
    hashes = [program.hash for program in programs]
    return hashlib.sha256("\0".join([*map(repr, facts), *hashes]).encode()).hexdigest()[:40]


def _installed() -> set[str]:
    """Names of the installed packages, with their versions."""
    return {found.name for folder in sys.path for found in Path(folder).glob("*.dist-info")}
