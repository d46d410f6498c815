"""Damaged newest checkpoints of a run: it names them, goes on from the newest whole one, and ends as if undisturbed."""

import re
import shutil

from benchmarks.drill import corruptions
from benchmarks.drill.cases import Field, Finding, Kind
from benchmarks.drill.runs import ONE, Start, cache_of, checkpoints, differences, unkilled

DAMAGES = (
    corruptions.flipped_bit,
    corruptions.truncated,
    corruptions.zeroed,
    corruptions.deleted,
    corruptions.deleted_folder,
    corruptions.older_chunk,
    corruptions.older_manifest,
)


def play(field: Field, case: int) -> Finding:
    """A run whose last one or two checkpoints are damaged is started again."""
    draw, directory = field.random(case), field.scratch / f"case{case}"
    shutil.copytree(unkilled(field, ONE), directory)
    steps = checkpoints(directory)
    kept = draw.randrange(4, len(steps))
    for step in steps[kept:]:
        shutil.rmtree(directory / "checkpoints" / f"{step:010}")
    done, damaged = [], steps[kept - draw.choice([1, 1, 2]) : kept]
    for step in damaged:
        damage = draw.choice(DAMAGES)
        target = corruptions.Target(directory / "checkpoints", draw, step, steps[0])
        done.append(f"{damage.__name__.replace('_', ' ')} in {step}: {damage(target)}")
    with Start(directory, ONE, cache=cache_of(field)) as start:
        codes = start.wait()
        said = start.said(errors=False) + start.said()
        if codes != [0]:
            return Finding("; ".join(done), (f"the run ended with {codes[0]}: {start.ending()}",))
    wrong = []
    found = re.search(r"resumed after (\d+) steps", said)
    begun = int(found[1]) if found else 0
    if unnamed := [step for step in damaged if step > begun and not re.search(rf"\b0*{step}\b", said)]:
        wrong.append(f"resumed after {begun} steps, without a word about the checkpoint of step {unnamed[0]}")
    return Finding("; ".join(done), (*wrong, *differences(directory, unkilled(field, ONE))))


KIND = Kind(
    name="fallback",
    short=4,
    full=40,
    checked="A run whose newest checkpoints are damaged names them, resumes from the newest whole one, and ends equal, "
    "to the bit, to the undisturbed run.",
    play=play,
)
