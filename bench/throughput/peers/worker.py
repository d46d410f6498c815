"""A contestant in its own process: builds and compiles, then runs steps on request.

    python -m bench.throughput.peers.worker '<Job as JSON>'

A line of standard output that begins with MARK is an event, in JSON; other lines are the contestant's own output. The
first event is `imported`; after a line on standard input, `ready`; then, for each number on standard input, `steps`; at
its end, `end`, and `parts` if the job asks for them. Nothing uses a device before the first line, so that the next
contestant can import its modules while one is running. Memory is in bytes.
"""

import ctypes
import importlib
import json
import signal
import sys
import time

from bench.throughput.peers.job import Job

MARK = "@event "


def memory_of_process() -> dict[str, int]:
    """Resident memory of this process: now, and its peak."""
    with open("/proc/self/status") as file:
        found = dict(line.split(":", 1) for line in file)
    return {name: int(found[key].split()[0]) * 1024 for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


def forget_peak() -> None:
    """Resets the peak of resident memory to the present value."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends, even if it is stopped."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def emit(event: str, **values) -> None:
    """Writes an event."""
    print(MARK + json.dumps({"event": event, **values}), flush=True)


def main() -> None:
    """Runs the contestant of the job on the command line."""
    die_with_parent()
    job = Job.from_json(sys.argv[1])
    module = importlib.import_module(f"bench.throughput.peers.{job.contestant}")
    emit("imported", memory=memory_of_process())
    sys.stdin.readline()
    contestant = module.Contestant(job)
    start = time.perf_counter()
    first = contestant.wait([contestant.step()])
    compile_s = time.perf_counter() - start
    start = time.perf_counter()
    second = contestant.wait([contestant.step()])
    step_s = time.perf_counter() - start
    highest = memory_of_process()["peak"]
    forget_peak()
    about = contestant.about()
    emit("ready", compile_s=compile_s, step_s=step_s, losses=first + second, about=about, highest=highest)
    for line in sys.stdin:
        start = time.perf_counter()
        losses = contestant.wait([contestant.step() for _ in range(int(line))])
        emit("steps", seconds=time.perf_counter() - start, losses=losses)
    emit("end", memory=memory_of_process(), device_peak=contestant.device_peak())
    if job.parts:
        try:
            emit("parts", **contestant.parts())
        except ValueError as error:  # the trace lacks the operations
            emit("parts", because=str(error))


if __name__ == "__main__":
    main()
