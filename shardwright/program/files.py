"""Names, reads and atomically writes the files of a run. Works without jax."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwright.data.untrusted import COPY_AGAIN, parse_json, parse_yaml, read_file, read_text

LOCK = ".lock"
"""File that a run locks. It names the process and host of the run, and is empty if no run uses the
directory."""
REPORT = "report.html"
"""The run's report page."""
OF_A_STEP = (
    "step",
    "event",
    "elapsed",
    "tokens",
    "seconds",
    "data_seconds",
    "tokens_per_second",
    "mfu",
    "unix_time",
)
"""Names that RunLog adds to the metrics of a step."""


_MOST_CONFIG = 2**20


def read_config(path: Path) -> dict[str, dict]:
    """Reads the configuration from a run's config.yaml.

    Raises ValueError if the file has none or cannot be read.
    """
    try:
        found = parse_yaml(read_text(path, _MOST_CONFIG))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}. {COPY_AGAIN}") from error
    return as_config(found, str(path))


def as_config(found: object, where: str) -> dict[str, dict]:
    """Returns `found` if it is a dict of sections.

    Otherwise raises ValueError; its message begins with `where`.
    """
    if not isinstance(found, dict) or not all(
        isinstance(section, dict) for section in found.values()
    ):
        raise ValueError(
            f"{where} has no configuration of a run: sections of settings. Is it a run of this "
            "program?"
        )
    try:
        json.dumps(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{where} has a value that is not a setting: {error}. Is it a run of this program?"
        ) from error
    return found


_MOST_BYTES, _MOST_STEP = 2**32, 2**53


def read_records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yields the objects of a run's JSON-lines file, and None for each line without an object with
    an integer `step`.

    A killed run may leave such a line. Raises FileNotFoundError, Damaged, or ValueError if the file
    cannot be read.
    """
    for line in read_file(path, _MOST_BYTES).splitlines():
        try:
            record = parse_json(line)
            is_one = type(record["step"]) is int and abs(record["step"]) < _MOST_STEP
        except (ValueError, KeyError, TypeError):
            is_one = False
        yield record if is_one else None


def end_of(records: Iterable[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Returns the event `end` that follows the last step of a metrics.jsonl; None if the run did
    not get to it.
    """
    end = None
    for record in filter(None, records):
        if record.get("event", "end") == "end":
            end = record
    return end if end and "event" in end else None


def duration(seconds: float) -> str:
    """Formats a time as h:mm:ss: `0:01:05` for 65 seconds."""
    seconds = round(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically, and creates its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, data: object) -> None:
    """Writes data as a JSON file, atomically."""
    write_whole(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
