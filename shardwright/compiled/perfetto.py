"""Turns the profiler's trace.json.gz into one that Perfetto accepts. A program, which a run starts."""

import gzip
import json
import sys


def convert(trace_path: str, perfetto_path: str) -> None:
    """Copies a trace without its "metadata" field, which the Perfetto viewer does not accept."""
    with gzip.open(trace_path, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    trace.pop("metadata", None)
    with gzip.open(perfetto_path, "wt", encoding="utf-8", compresslevel=5) as file:
        json.dump(trace, file)


if __name__ == "__main__":
    convert(*sys.argv[1:])
