"""SIGKILL at random moments: a run that is killed and started again ends as one that was never killed."""

import itertools
import random
import time
from pathlib import Path

from benchmarks.drill.cases import Field, Finding, Kind
from benchmarks.drill.runs import (
    ONE,
    STEPS,
    TWO,
    Mesh,
    Start,
    cache_of,
    checkpoints,
    differences,
    differing_checkpoints,
    farthest_loss,
    unkilled,
)

MOMENTS = {"starting": 2, "in a step": 4, "saving": 3, "ending": 1}
"""When a process is killed, and how often, in tenths."""
SPREAD_S = {"starting": 9.0, "in a step": 1.5, "saving": 0.03, "ending": 1.0}
"""Seconds over which the kills are spread: from the start, the first step, the beginning of a save, the last step."""
MESHES = (ONE, Mesh(1, 1, 4), Mesh(2, 2, 1), Mesh(1, 1, 1))
"""Meshes that an elastic run changes between."""
BAND = 5e-6
"""Largest relative difference of a loss of an elastic run."""
ENDS_IN_S = 100.0
"""Seconds within which a process ends whose partner was killed: the timeouts of the run, 60 s, and its start."""
ONE_OF = ("one process", "one process", "one process", "two processes", "elastic")
"""The kind of run of each case, in turn."""


def cases(count: int) -> int:
    """Fifteen for 120 kills, but no more than kills."""
    return min(count, 5 * -(-count // 40))


def kills_of(count: int, case: int) -> int:
    """How many of the kills are in this case."""
    return count // cases(count) + (case < count % cases(count))


def moment(draw: random.Random) -> str:
    """A kind of moment."""
    return draw.choices(list(MOMENTS), list(MOMENTS.values()))[0]


def wait_for_moment(start: Start, when: str, draw: random.Random) -> bool:
    """Waits for a moment of this kind. Returns whether it came before a process ended."""
    saves = start.directory / "checkpoints"
    there = lambda: {path.name for path in saves.iterdir()} if saves.is_dir() else set()
    before = there()
    conditions = {
        "starting": lambda: True,
        "in a step": lambda: "\nstep " in start.said(errors=False),
        "saving": lambda: there() - before,
        "ending": lambda: f"\nstep {STEPS}/{STEPS}" in start.said(errors=False),
    }
    if not start.wait_until(conditions[when]):
        return False
    end = time.monotonic() + draw.uniform(0, SPREAD_S[when])
    return start.wait_until(lambda: time.monotonic() >= end)


def kill(start: Start, when: str, draw: random.Random) -> list[str]:
    """SIGKILL to one process or to all. Returns what is wrong: a partner that does not end, or says nothing."""
    lost = draw.choice([(0,), (1,), (0, 1)]) if start.mesh.processes > 1 else (0,)
    start.kill(lost)
    codes, wrong = start.wait(ENDS_IN_S), []
    for i, code in enumerate(codes):
        if i in lost:
            continue
        if code is None:
            wrong.append(f"process {i} has not ended {ENDS_IN_S:g} s after process {lost[0]} was killed {when}")
        elif code == 0 and when != "ending":
            wrong.append(f"process {i} ended with status 0 after process {lost[0]} was killed {when}")
        elif code != 0 and not start.said(i).strip():
            wrong.append(f"process {i} ended with status {code} and no message")
    start.kill()
    return wrong


def judged(field: Field, directory: Path, which: str) -> list[str]:
    """What is wrong with a finished run."""
    mesh = TWO if which == "two processes" else ONE
    if which != "elastic":
        return differences(directory, unkilled(field, mesh))
    away = farthest_loss(directory, unkilled(field, mesh))
    return [f"a loss is {away:.1e} away from the run that stayed on its mesh"] if away > BAND else []


def play(field: Field, case: int) -> Finding:
    """A run, or several, with the kills of this case."""
    draw, which = field.random(case), ONE_OF[case % len(ONE_OF)]
    kills, wrong, moments = kills_of(field.count, case), [], []
    unkilled(field, TWO if which == "two processes" else ONE)
    directory = field.scratch / f"case{case}_run0"
    for number in itertools.count():
        mesh = {"one process": ONE, "two processes": TWO}.get(which) or draw.choice(MESHES)
        when = moment(draw)
        with Start(directory, mesh, cache=cache_of(field)) as start:
            if len(moments) < kills and wait_for_moment(start, when, draw):
                wrong += kill(start, when, draw)
                moments.append(f"{which}, {when}")
                if which != "elastic":
                    wrong += differing_checkpoints(directory, unkilled(field, mesh))
                continue
            codes = start.wait()
            if any(codes):
                saved = checkpoints(directory)
                wrong.append(f"start {number} ended with {codes}, with checkpoints {saved}: {start.ending()}")
                break
            wrong += judged(field, directory, which)
            if len(moments) >= kills:
                break
            directory = field.scratch / f"case{case}_run{number + 1}"
    return Finding(f"{which}: {', '.join(moments)}", tuple(wrong), len(moments), tuple(moments))


KIND = Kind(
    name="kills",
    short=10,
    full=120,
    checked="Every checkpoint, the metrics and the samples equal, to the bit, those of a run that was never killed; "
    f"where the mesh changes, losses are within {BAND:g}. A process whose partner was killed ends with a message.",
    play=play,
    cases=cases,
)
