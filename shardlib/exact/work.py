"""Estimates what it costs to run a program in exact arithmetic, before it is run."""

import math
from typing import Any

from shardlib.equations import jaxprs_of, shape_of
from shardlib.exact.endings import Undecided
from shardlib.interpret import equations_in

MOST = 3e8
"""Entries that a run may compute: about half a minute of CPU time."""
EQUATION = 500
"""Time of an equation of a few entries, as a multiple of that of an entry."""
MOST_OF_A_LOOP = MOST
"""That a `while` may compute, whose number of turns is not known before."""
MATMUL = 1e-2
"""Time of a multiplication within a matmul, as a part of that of an entry elsewhere."""


def work_of(program: Any, devices: int = 1) -> float:
    """Counts the entries that a program computes on all devices, with one turn of each `while`."""
    return sum(_of_equation(eqn, devices) for eqn in equations_in(program, inside=False))


def refuse_beyond(most: float, work: float) -> None:
    """Raises Undecided if a program would compute more than `most` entries."""
    if work > most:
        raise Undecided(
            f"it computes {work:.1g} entries, more than the {most:.1g} that are run in exact "
            "arithmetic: pass smaller shapes"
        )


def _of_equation(eqn: Any, devices: int) -> float:
    name = eqn.primitive.name
    if name == "shard_map":
        devices = math.prod(eqn.params["mesh"].shape.values())
    inside = [work_of(body, devices) for body in jaxprs_of(eqn)]
    if inside:
        turns = eqn.params["length"] if name == "scan" else 1
        return turns * (max(inside) if name == "cond" else sum(inside))
    counts = [math.prod(shape_of(var)) for var in (*eqn.invars, *eqn.outvars)]
    work = EQUATION / devices + max(counts, default=0)
    if name in ("dot_general", "conv_general_dilated"):
        work += MATMUL * math.sqrt(math.prod(counts))  # [m, k] @ [k, n] has m·k·n multiplications
    return devices * work
