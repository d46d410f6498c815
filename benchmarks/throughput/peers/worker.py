"""A contestant in a process of its own: builds and compiles, then runs steps when it is told to.

    python -m benchmarks.throughput.peers.worker '<Job as JSON>'

Each line of JSON on standard output behind MARK is an event; everything else there is the contestant's own talk. First
`imported`; after a line on standard input, `ready`; then for each number read there `steps`; at its end, `end`. Nothing
touches a device before the first line: the next contestant's imports may pass while one is at work. Memory is in bytes.
"""

import ctypes
import importlib
import json
import signal
import sys
import time

from benchmarks.throughput.peers.job import Job

MARK = "@event "


def memory_of_process() -> dict[str, int]:
    """Resident memory now and at its highest, of this process."""
    with open("/proc/self/status") as file:
        found = dict(line.split(":", 1) for line in file)
    return {name: int(found[key].split()[0]) * 1024 for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


def forget_peak() -> None:
    """Has the highest resident memory start again from what it is now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def die_with_parent() -> None:
    """Has the kernel end this process when its parent is gone, even where it is stopped."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def say(event: str, **values) -> None:
    print(MARK + json.dumps({"event": event, **values}), flush=True)


def main() -> None:
    die_with_parent()
    job = Job.from_json(sys.argv[1])
    module = importlib.import_module(f"benchmarks.throughput.peers.{job.contestant}")
    say("imported", memory=memory_of_process())
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
    say("ready", compile_s=compile_s, step_s=step_s, losses=first + second, about=about, highest=highest)
    for line in sys.stdin:
        start = time.perf_counter()
        losses = contestant.wait([contestant.step() for _ in range(int(line))])
        say("steps", seconds=time.perf_counter() - start, losses=losses)
    say("end", memory=memory_of_process(), device_peak=contestant.device_peak())


if __name__ == "__main__":
    main()
