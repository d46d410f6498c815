"""What a run examines about its steps.

The run imports this module, and no other module of this folder.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from shardlib import products
from shardwright.inspect.as_written import compared
from shardwright.inspect.causality import describe_causality
from shardwright.inspect.compiled.trace import top_lines
from shardwright.inspect.planning import plan_run
from shardwright.inspect.soundness import check_steps
from shardwright.inspect.statistics.collect import RunStatistics
from shardwright.modeling.kernel_checks import check_paths
from shardwright.program.background import FAILURES, run_beside
from shardwright.program.best_effort import in_a_line
from shardwright.program.printing import log
from shardwright.program.processes import in_all_processes
from shardwright.program.step import Step

__all__ = (
    "RunStatistics",
    "check",
    "check_as_written",
    "check_kernels",
    "draw_step",
    "plan_run",
    "read_trace",
)


def check(steps: Sequence[Step]) -> None:
    """Raises unless the steps compute on their mesh what they compute on one device, and look at no
    later token.

    Args:
        steps: the training step with the current settings, and those with the settings of later
            steps.
    """
    for how in dict.fromkeys(check_steps(step).how for step in steps):
        log(
            f"checked    training and evaluation compute on this mesh what one device computes "
            f"({how})"
        )
    for line in dict.fromkeys(describe_causality(step) for step in steps):
        log(f"causality  {line}")


def check_kernels(steps: Sequence[Step], options: dict[str, Any]) -> None:
    """Checks each op's implementation for this platform against its reference implementation, by
    running both.

    The arguments are those of `check`, and compiler options. Raises if they differ.
    """
    for step in {step.config.training.seq_len: step for step in steps}.values():
        check_paths(step, options)
    products.check_sums()


def check_as_written(step: Step, hlo: Path | None) -> None:
    """Prints whether the compiled step communicates as written, and what differs.

    All processes call it.

    Under hardware.strict, a difference raises ValueError, as does process 0 without an HLO text.
    """

    def check(strict: bool) -> None:
        try:
            text = hlo.read_text() if hlo else ""
            summary, lines = compared(step.jaxpr, step.mesh, text, strict)
        except Exception as error:  # another XLA may write its programs differently
            if strict:
                raise ValueError(
                    f"hardware.strict is true, but the step is not compiled as written:\n{error}"
                ) from error
            summary = f"its collectives are not known: {in_a_line(error)}"
            lines = []
        log("\n".join([f"compiled   {summary}", *(f"WARNING    {line}" for line in lines)]))

    if step.mesh.size > 1:
        in_all_processes(
            lambda: check(step.config.hardware.strict) if jax.process_index() == 0 else None
        )


def draw_step(hlo: Path) -> str:
    """Writes the table and the picture of the step next to its HLO text, in a process of low
    priority.

    Returns a line for the user: where the picture is, or why there is none.
    """
    try:
        drawn = run_beside("shardwright.inspect.compiled.files", hlo).strip()
    except FAILURES as error:
        return f"picture    none, {hlo} cannot be drawn: {error}"
    return f"picture    {drawn}"


def read_trace(*given: object) -> tuple[dict[str, Any], str]:
    """The time between steps from a trace, or why it is unknown; and, for a terminal, its time by
    source line.

    The arguments are those of the program compiled/trace.py, which runs in a process of low
    priority.
    """
    try:
        found = json.loads(run_beside("shardwright.inspect.compiled.trace", *given))
    except FAILURES as error:
        found = {
            key: {"because": f"the trace could not be read: {error}"} for key in ("bubble", "lines")
        }
    lines = found["lines"]
    unknown = f"slowest    source lines: not known, because {lines.get('because')}"
    return found["bubble"], unknown if "because" in lines else top_lines(lines)
