"""A contestant in its own process: builds and compiles, then runs steps on request.

    python -m bench.throughput.peers.worker '<Job as JSON>'

A line of standard output that begins with MARK is an event, in JSON; other lines are the contestant's own output. The
first event is `ready`; then, for each number on standard input, `steps`.
"""

import ctypes
import importlib
import json
import signal
import sys
import time

from bench.throughput.peers.job import Job

MARK = "@event "


def host_peak() -> int:
    """Peak of the resident memory of this process, in bytes."""
    with open("/proc/self/status") as file:
        found = dict(line.split(":", 1) for line in file)
    return int(found["VmHWM"].split()[0]) * 1024


def emit(event: str, **values) -> None:
    print(MARK + json.dumps({"event": event, **values}), flush=True)


def main() -> None:
    """Runs the contestant of the job on the command line."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent, even if it is stopped
    job = Job.from_json(sys.argv[1])
    contestant = importlib.import_module(f"bench.throughput.peers.{job.contestant}").Contestant(job)

    def timed(steps: int) -> tuple[float, list[float]]:
        start = time.perf_counter()
        losses = contestant.wait([contestant.step() for _ in range(steps)])
        return time.perf_counter() - start, losses

    (compile_s, first), (step_s, second) = timed(1), timed(1)
    emit("ready", compile_s=compile_s, step_s=step_s, losses=first + second, about=contestant.about())
    for line in sys.stdin:
        seconds, losses = timed(int(line))
        emit("steps", seconds=seconds, losses=losses, peak=contestant.device_peak() or host_peak())


if __name__ == "__main__":
    main()
