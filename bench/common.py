"""Shares helpers between the programs of this folder."""

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
