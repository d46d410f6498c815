"""Reads traces of jax.profiler: the time between steps, and the time by source line. A program, which a run starts."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from shardwright.compiled.devices import devices_of
from shardwright.compiled.files import read_step, write_json
from shardwright.compiled.times import line_times, step_bubble

LINES = "profile_by_line.json"
"""Name of the file beside the trace with the time by source line."""
PERFETTO = "perfetto_trace.json.gz"
"""Name of the file beside the trace that ui.perfetto.dev opens."""


def convert(trace: Path) -> None:
    """Writes PERFETTO beside a trace.json.gz: the same without its "metadata", which Perfetto does not accept."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        content = json.load(file)
    content.pop("metadata", None)
    with gzip.open(trace.with_name(PERFETTO), "wt", encoding="utf-8", compresslevel=5) as file:
        json.dump(content, file)


def read_trace(trace: Path, module: str, steps: int, hlo: Path | None) -> dict[str, Any]:
    """The time between steps as "bubble" and the time by source line as "lines", or {"because": …} for each.

    Args:
        trace: the xplane.pb. The file LINES is written beside it.
        module: name of the traced program.
        steps: number of whole steps in the trace, which LINES has too.
        hlo: the program's HLO text; None if there is none.
    """
    from jax.profiler import ProfileData

    devices, found = devices_of(ProfileData.from_file(str(trace)), module, steps), {}
    try:
        found["bubble"] = step_bubble(devices, steps)
    except ValueError as reason:
        found["bubble"] = {"because": str(reason)}
    try:
        if hlo is None:
            raise ValueError("there is no HLO text of the step")
        found["lines"] = {"steps": steps, **line_times(devices, read_step(hlo))}
        write_json(trace.with_name(LINES), found["lines"])
    except (ValueError, OSError) as error:
        found["lines"] = {"because": str(error)}
    return found


def main(directory: str, module: str, steps: str, hlo: str = "") -> None:
    """Writes the files, and prints what was found as JSON. `directory` is the one that jax.profiler wrote."""
    for trace in [*Path(directory).glob("*.trace.json.gz")]:
        convert(trace)
    profiles = [*Path(directory).glob("*.xplane.pb")]
    if len(profiles) != 1:
        raise OSError(f"{len(profiles)} files *.xplane.pb in {directory}")
    print(json.dumps(read_trace(profiles[0], module, int(steps), Path(hlo) if hlo else None)))


if __name__ == "__main__":
    main(*sys.argv[1:])
