"""Files of a run, for programs without jax: their names, config.yaml as data, and files that are written whole."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwright_data.untrusted import COPY_AGAIN, parse_json, parse_yaml, read_file, read_text

LOCK = ".lock"
"""File that a run locks. Its line says which process on which host that is; it is empty when no run is there."""
REPORT = "report.html"
"""The page that shows the run."""
OF_A_STEP = ("step", "event", "tokens", "seconds", "tokens_per_second", "mfu")
"""Names that RunLog adds to the metrics of a step."""


_MOST_CONFIG = 2**20


def read_config(path: Path) -> dict[str, dict]:
    """The configuration in a run's config.yaml. Raises ValueError if the file has none."""
    try:
        found = parse_yaml(read_text(path, _MOST_CONFIG))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}. {COPY_AGAIN}") from error
    return as_config(found, str(path))


def as_config(found: object, where: str) -> dict[str, dict]:
    """`found` if it has the form of a configuration. Raises ValueError, which begins with `where`, if it has not."""
    if not isinstance(found, dict) or not all(isinstance(section, dict) for section in found.values()):
        raise ValueError(f"{where} has no configuration of a run: sections of settings. Is it a run of this program?")
    try:
        json.dumps(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} has what is no setting: {error}. Is it a run of this program?") from error
    return found


def literal(value: object) -> Any:
    """A saved value as OmegaConf takes it for what it says: `${oc.env:HOME}` is that text, and not a directory."""
    if isinstance(value, Mapping):
        return {key: literal(part) for key, part in value.items()}
    if isinstance(value, list):
        return [literal(part) for part in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


_MOST_BYTES, _MOST_STEP = 2**32, 2**53


def read_records(path: Path) -> Iterator[dict[str, Any] | None]:
    """The objects in a run's file of JSON lines, each with a step; None for a line that is none, as of a killed run.

    Raises what `read_file` raises.
    """
    for line in read_file(path, _MOST_BYTES).splitlines():
        try:
            record = parse_json(line)
            is_one = type(record["step"]) is int and abs(record["step"]) < _MOST_STEP
        except (ValueError, KeyError, TypeError):
            is_one = False
        yield record if is_one else None


def duration(seconds: float) -> str:
    """The time as h:mm:ss: `0:01:05` for 65 seconds."""
    seconds = round(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def write_whole(path: Path, text: str) -> None:
    """Writes a file that has this name only once it is complete, and the directory that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, data: object) -> None:
    """Writes data as a JSON file that has this name only once it is complete."""
    write_whole(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
