"""Reads the configurations saved in checkpoints, and checks that a run may resume from one.

A saved configuration may be untrusted: nothing in it is interpolated, and a module that it names is
imported only if it is shipped here, or the user named it or trusts the configuration.
"""

import dataclasses
import os
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardlib.schedules import SCHEDULES
from shardwright.data.checks import FIXED, marked
from shardwright.data.loader import DataConfig, SourceConfig
from shardwright.data.untrusted import check_types
from shardwright.modeling.model import is_shipped, module_of
from shardwright.program.changes import check_number, firsts, may_change, settings_at
from shardwright.program.checks import to_config
from shardwright.program.config import Config, TrainingConfig
from shardwright.program.differences import config_differences, flat
from shardwright.program.files import as_config
from shardwright.settings.settings import is_section, without_null

_METADATA = {
    "config?": {
        "model": {"module?": str},
        "training?": {"compute_dtype?": str, "changes?": [{"step": int}]},
        "pipeline?": {"schedule?": str},
    },
    "loader?": {
        "step?": int,
        "epoch?": int,
        "block?": int,
        "documents?": int,
        "tokens?": int,
        "files?": str,
    },
    "provenance?": {
        "source": {str: str},
        "programs": {str: str},
        "traced_by": str,
        "untraced?": str,
    },
    "clock?": {"seconds": float},
    "best?": {"step": int, "loss": float, "text": int},
    "skips?": {"count?": int, "in_a_row?": int, "recent?": [(float, float)], "lowest?": [float]},
}
"""Types of a checkpoint's metadata, for check_types; imported checkpoints lack some."""


def saved_config(metadata: object) -> dict[str, dict]:
    """Returns the configuration in the metadata of a checkpoint.

    Imported checkpoints lack most sections.

    Raises:
        ValueError: it has none, or another part of the metadata has the wrong type.
    """
    config = as_config(
        metadata.get("config") if isinstance(metadata, dict) else None, "the checkpoint's metadata"
    )
    check_types("the checkpoint's metadata", metadata, _METADATA, "Take another checkpoint.")
    config = {"data": {}, "training": {}} | config
    check_number(config["training"].get("changes", ()))
    return config


def with_defaults(saved: dict, named: str | None = None) -> dict:
    """Fills in defaults for the settings that a checkpoint's configuration lacks.

    Model settings are filled in only if the module is shipped here, or `named` by the user, because
    no other is imported.
    """
    filled = {}
    for section in dataclasses.fields(Config):
        given = saved.get(section.name, {})
        kind: Any = section.type
        if section.name == "model":
            module = str(given.get("module", "train"))
            if not (is_shipped(module) or module == named):
                continue
            kind = module_of(module).ModelConfig
        filled[section.name] = _filled(kind, given)
    return saved | filled


def _filled(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in defaults for the settings that a section, or a section in it, lacks."""
    defaults = {
        f.name: f.default for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING
    }
    made = {
        f.name: f.default_factory() for f in dataclasses.fields(kind) if callable(f.default_factory)
    }
    inner = {
        k: without_null(v)
        for k, v in typing.get_type_hints(kind).items()
        if isinstance(given.get(k), Mapping)
    }
    return {**defaults, **made, **given} | {
        k: _filled(v, given[k]) for k, v in inner.items() if is_section(v)
    }


def config_of(saved: dict, trust: bool = False) -> Config:
    """Converts a checkpoint's configuration to a checked Config.

    Raises ValueError for a setting that is missing, unknown or out of range; and, unless `trust`,
    for a module that is not shipped here, and for data or a tokenizer on another host.
    """
    module = saved["model"].get("module", "train")
    schedule = saved.get("pipeline", {}).get("schedule", "gpipe")
    named = [
        ("model.module", module, is_shipped(str(module))),
        ("pipeline.schedule", schedule, schedule in SCHEDULES),
    ]
    named += [(name, value, ":" not in str(value)) for name, value in _functions(saved)]
    for name, value, known in named:
        if not (known or trust):
            raise ValueError(
                f"{name} of the checkpoint is {value!r}, which is not shipped here; importing it "
                "would run its code. Give trust=true if the run is yours or you have read that "
                "file."
            )
    c = to_config(with_defaults(saved, module))
    for name, value in () if trust else fetched(c):
        raise ValueError(
            f"{name} of the run is {value!r}, which would be downloaded. Give trust=true if the "
            f"run is yours or you trust that address."
        )
    return c


def _functions(saved: dict) -> Iterator[tuple[str, object]]:
    """Yields the settings of a checkpoint that may name functions of a module, as
    module:function.
    """
    optimizer, trackers = saved.get("optimizer", {}), saved.get("trackers", {})
    yield from (
        (f"optimizer.{name}", optimizer.get(name)) for name in ("algorithm", "loss", "schedule")
    )
    groups, names = optimizer.get("groups"), trackers.get("names")
    for group in groups if isinstance(groups, list) else [groups]:
        yield "optimizer.groups", group.get("algorithm") if isinstance(group, dict) else None
    for name in names if isinstance(names, list) else [names]:
        yield "trackers.names", name


def fetched(c: Config) -> Iterator[tuple[str, str]]:
    """Yields the data settings that would access another host when a run's batches or tokenizer are
    read.
    """
    values = flat({"data": dataclasses.asdict(c.data), "training.changes": c.training.changes})
    yield from (
        (name, url[0])
        for name, value in values.items()
        if (url := re.search(r"[^\s'\"]+://[^'\"]*", str(value)))
    )
    if (stream := c.data.stream) is not None:
        local = stream.tokenizer_kind == "huggingface" and os.path.exists(stream.tokenizer or "")
        for name in ("dataset", *(() if local else ("tokenizer",))):
            if getattr(stream, name) is not None:
                yield f"data.stream.{name}", getattr(stream, name)


def fixed_settings(saved: dict, current: dict) -> tuple[str, ...]:
    """Lists the sections, and dotted names of settings, that may not change when a run resumes.

    The mesh, the number of processes, logging, microbatches and the length of the run are not among
    them.
    """
    fixed = ["model", "optimizer"]
    fixed += [f"data.{name}" for name in marked(DataConfig, FIXED)]
    fixed += [f"training.{name}" for name in marked(TrainingConfig, FIXED)]
    for config in (saved, current):
        sources = config["data"].get("mixture") or {}
        fixed += [
            f"data.mixture.{name}.{field}"
            for name in sources
            for field in marked(SourceConfig, FIXED)
        ]
    # A resumed run does not read init_from, whose directory may be gone, so it may be omitted but
    # not changed.
    fixed += ["training.init_from"] if current["training"].get("init_from") is not None else []
    return (*fixed,)


def check_resumes(saved: dict, c: Config, directory: Path, done: int) -> None:
    """Raises ValueError, with the differences, if `c` cannot resume the run in `directory`, made
    with `saved`.

    Both must have the same fixed settings in each of the first `done` steps. Later steps may
    differ, and follow `c`.
    """
    saved = with_defaults(saved, c.model.module)
    current = dataclasses.asdict(c)
    for first in sorted({*firsts(saved), *firsts(current)}):
        before, now = settings_at(saved, first), settings_at(current, first)
        differences = (
            config_differences(before, now, fixed_settings(before, now)) if first < done else []
        )
        if differences:
            since = f" after step {first}" if first else ""
            names = [line.partition(":")[0] for line in differences]
            changed = next(
                (".".join(name.split(".")[:2]) for name in names if may_change(name)), None
            )
            instead = (
                f" To change {changed} from step {done} on, add it to training.changes"
                f"{', if all weights keep their shapes' * changed.startswith('model.')}."
                if changed
                else ""
            )
            raise ValueError(
                f"the run in {directory} was made with other settings{since}:\n  "
                + "\n  ".join(differences)
                + "\nChange these back to resume it, or start another run with a new "
                "paths.model_name." + instead
            )


def deciding_settings(config: Config) -> dict[str, Any]:
    """Returns the settings that determine what the steps compute, without data paths, in which
    hosts may differ.
    """
    data = config.data
    weights = {name: source.weight for name, source in (data.mixture or {}).items()}
    parts = {
        name: getattr(config, name)
        for name in ("model", "optimizer", "training", "pipeline", "mesh")
    }
    parts["paths.model_name"] = config.paths.model_name
    fixed = [getattr(data, name) for name in marked(DataConfig, FIXED) if name != "stream"]
    return parts | {"data": (*fixed, data.skip_steps, weights)}
