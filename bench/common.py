"""What several programs of this folder use."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path


def parser_of(page: str | None) -> argparse.ArgumentParser:
    """The parser of a program whose --help shows the text of its module."""
    return argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]


def cpu_seconds(action: Callable[[], object]) -> float:
    """Processor time of an action, of all threads of this process."""
    began = time.process_time()
    action()
    return time.process_time() - began


def host_peak() -> int:
    """Peak of the resident memory of this process, in bytes."""
    found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(found["VmHWM"].split()[0]) * 1024
