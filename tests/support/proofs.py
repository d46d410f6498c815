"""What the check of a run's steps finds, by the program of them that shows it soonest."""

from collections.abc import Callable

from shardwright.inspect import soundness
from shardwright.program.step import NAMES, Step


def found_soon(step: Step, is_shown: Callable[[str], bool]) -> str:
    """What is found in one of the smaller programs alone, if that is what a test looks for; else in
    all of a step.

    The training program takes most of the time of a proof, and has what the evaluation has.
    """
    text = ""
    for names in (("evaluation",), ("start",), NAMES):
        found, undecided, *_ = soundness.examine(step, names)
        text = "\n".join(map(str, [*found, *undecided]))
        if is_shown(text):
            break
    return text
