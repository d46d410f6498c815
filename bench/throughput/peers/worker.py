"""A contestant in its own process: builds and compiles, then runs steps on request.

    python -m bench.throughput.peers.worker '<Job as JSON>'

A line of standard output that begins with MARK is an answer, in JSON; other lines are the
contestant's own output. The first answer says that it is ready; then there is one for each line of
standard input, a number of steps.
"""

import importlib
import json
import sys
import time

from bench.throughput.peers.job import Job

MARK = "@answer "


def answer(**values) -> None:
    print(MARK + json.dumps(values), flush=True)


def main() -> None:
    job = Job.from_json(sys.argv[1])
    peer = importlib.import_module(f"bench.throughput.peers.{job.contestant}")
    contestant = peer.Contestant(job, job.shapes.random_weights(job.seed))

    def timed(steps: int) -> float:
        start = time.perf_counter()
        contestant.wait([contestant.step() for _ in range(steps)])
        return time.perf_counter() - start

    compile_s, step_s = timed(1), timed(1)
    answer(compile_s=compile_s, step_s=step_s)
    for line in sys.stdin:  # which ends with the program that asks
        answer(seconds=timed(int(line)), peak=contestant.peak())


if __name__ == "__main__":
    main()
