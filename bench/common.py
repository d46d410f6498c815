"""Shares helpers between the programs of this folder."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path


def cpu_seconds(action: Callable[[], object]) -> float:
    """Returns the CPU time of an action, over all threads of this process."""
    began = time.process_time()
    action()
    return time.process_time() - began


def host_peak() -> int:
    """Returns the peak resident memory of this process, in bytes."""
    found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(found["VmHWM"].split()[0]) * 1024


def parser_of(page: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose --help shows the docstring of the program's module."""
    return argparse.ArgumentParser(
        description=page, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def first_line(error: Exception) -> str:
    """Returns the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]
