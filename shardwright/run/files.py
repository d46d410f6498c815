"""Files of a run, for programs that read them without jax: their names, and config.yaml as data."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from shardwright_data.foreign import read_text

LOCK = ".lock"
"""File that exists while a run is in the directory. Its line says which process on which host that is."""
REPORT = "report.html"
"""The page that shows the run."""
OF_A_STEP = ("step", "event", "tokens", "source_tokens", "seconds", "tokens_per_second", "mfu", "mfu_full_attention")
"""Names that RunLog adds to the metrics of a step."""

DEPTH = 20
"""Levels of groups and lists that no saved configuration has."""
PLAIN = (str, int, float, type(None))
"""Types of a setting that is not a list or a group of others."""


def read_config(path: Path) -> dict[str, dict]:
    """The configuration in a run's config.yaml. Raises ValueError if the file has none."""
    try:
        found = yaml.safe_load(read_text(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        what = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read: {what}. Copy it again.") from error
    return as_config(found, str(path))


def as_config(found: Any, where: str) -> dict[str, dict]:
    """`found` if it has the form of a configuration. Raises ValueError, which begins with `where`, if it has not."""
    if not isinstance(found, dict) or not all(isinstance(section, dict) for section in found.values()):
        raise ValueError(f"{where} has no configuration of a run: sections of settings. Is it a run of this program?")
    for name, value in settings_in(found):
        if not isinstance(value, PLAIN):
            raise ValueError(f"{where}: {name} is {value!r}, which is no setting. Is it a run of this program?")
    return found


def settings_in(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The values in nested dicts and lists, by dotted names. Raises ValueError for what is DEPTH deep."""
    if depth == DEPTH:
        raise ValueError(f"{name[:40]}… is nested too deeply: a setting is at most {DEPTH - 1} deep.")
    inside = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if inside is None:
        yield name, value
    else:
        for key, part in inside:
            yield from settings_in(part, f"{name}.{key}" if name else str(key), depth + 1)


def duration(seconds: float) -> str:
    """The time as h:mm:ss: `0:01:05` for 65 seconds."""
    seconds = round(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
