"""Reads a trace (xplane.pb): the time between steps, and the time by source line. A program, which a run starts."""

import json
import sys
from pathlib import Path
from typing import Any

from shardwright.compiled.bubble import NotMeasured, step_bubble
from shardwright.compiled.files import read_program, write_json
from shardwright.compiled.times import line_times

LINES = "profile_by_line.json"
"""Name of the file beside the trace with the time by source line."""


def read_trace(trace: Path, module: str, steps: int, hlo: Path | None) -> dict[str, Any]:
    """The time between steps as "bubble" and the time by source line as "lines", or {"because": …} for each.

    Args:
        trace: the xplane.pb. The file LINES is written beside it.
        module: name of the traced program.
        steps: number of whole steps in the trace, which LINES has too.
        hlo: the program's HLO text; None if there is none.
    """
    from jax.profiler import ProfileData

    profile, found = ProfileData.from_file(str(trace)), {}
    try:
        found["bubble"] = step_bubble(profile, module, steps)
    except NotMeasured as reason:
        found["bubble"] = {"because": str(reason)}
    try:
        if hlo is None:
            raise ValueError("there is no HLO text of the step")
        program, step, source = read_program(hlo)
        found["lines"] = {"steps": steps, **line_times(profile, program, step, source)}
        write_json(trace.with_name(LINES), found["lines"])
    except (ValueError, OSError) as error:
        found["lines"] = {"because": str(error)}
    return found


def main(trace: str, module: str, steps: str, hlo: str = "") -> None:
    """Prints what was found as JSON."""
    print(json.dumps(read_trace(Path(trace), module, int(steps), Path(hlo) if hlo else None)))


if __name__ == "__main__":
    main(*sys.argv[1:])
