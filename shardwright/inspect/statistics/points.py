"""The points of a traced step whose statistics are computed: what it saves for the backward pass, and its gradients."""

import ast
import collections
import dataclasses
import functools
import linecache
from collections.abc import Iterator

import jax

from shardlib import layers
from shardlib.equations import CALLS, frames_of
from shardlib.interpret import Operation, operations_in
from shardlib.places import is_installed
from shardwright import jax_extra
from shardwright.inspect.statistics.rerun import Path

GRADIENT = "gradient"
"""Name by which train.make_training_step marks each gradient, in the order of the weights."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A named value of a step.

    Attributes:
        name: the function around it, and what it is assigned to: `Llama.layer q`; the second of a name ends in `#2`.
        place: `file.py:line`.
        paths: paths of its equations in one turn of the loops around it, in program order. Several if the line runs
            several times, as in the layers of a period.
        of_layers: for each loop around it, outermost first, True if it is the loop over layers.
    """

    name: str
    place: str
    paths: tuple[Path, ...]
    of_layers: tuple[bool, ...]


ENTERED = CALLS | {"shard_map", "scan"}
"""Primitives whose bodies a Rerun runs equation by equation."""


def equations(program: object) -> Iterator[Operation]:
    """Iterates over the equations that a Rerun runs separately, in program order."""
    for op in operations_in(program):
        if op.name not in ENTERED and all(caller.name in ENTERED for caller in op.callers):
            yield op


def loops_around(op: Operation) -> list[Operation]:
    """The loops around an equation, outermost first."""
    return [caller for caller in op.callers if caller.name == "scan"]


def is_loop_over_layers(loop: Operation) -> bool:
    """True if shardlib/layers.py made a loop."""
    own = [file for file, _ in frames_of(loop.eqn) if not is_installed(file)]
    return own[-1:] == [layers.__file__]


def is_again(op: Operation) -> bool:
    """True if the backward pass computes the equation, again or for the first time."""
    return any(caller.params.get("differentiated", False) for caller in op.callers)


@functools.cache
def function_and_target(file: str, line: int) -> str:
    """The function around a line, with its class, and what the statement there assigns to: `Llama.layer v`."""
    try:
        nodes = ast.walk(ast.parse("".join(linecache.getlines(file))))
    except (SyntaxError, ValueError):  # a file that has changed since it was imported
        return ""
    around = [node for node in nodes if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)]
    owners = [node.name for node in around if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    targets = [node.targets[0] for node in around if isinstance(node, ast.Assign)]
    targets += [node.target for node in around if isinstance(node, ast.AnnAssign)]
    return " ".join(filter(None, [".".join(owners), *map(ast.unparse, targets[-1:])]))


def _region(eq: Operation) -> tuple[bool, list]:
    """True in the backward pass, and the loops around."""
    return is_again(eq), [loop.eqn for loop in loops_around(eq)]


def saved_points(program: object, names: tuple[str, ...] = (jax_extra.SAVED,)) -> list[Point]:
    """The points at which the step marks a value by one of `names`, in program order. A recomputed one counts once."""
    found: dict[tuple, list[Operation]] = {}
    for eq in equations(program):
        is_saved = eq.name == "name" and eq.params["name"] in names
        if is_saved and not eq.eqn.outvars[0].aval.manual_axis_type.unreduced:  # a partial sum has no statistics
            found.setdefault((eq.line(), eq.eqn.outvars[0].aval.dtype), []).append(eq)
    points = []
    seen = collections.Counter()
    for (line, _), places in found.items():
        # Like the first of them: in the same loops, and not in the backward pass unless the first is.
        first = min(places, key=is_again)
        of_layers = tuple(map(is_loop_over_layers, loops_around(first)))
        regions = [_region(first)]
        if any(of_layers) and not is_again(first):  # another stack of layers may compute this line too
            others = [_region(eq) for eq in places if not is_again(eq)]
            regions += [x for i, x in enumerate(others) if x not in [*regions, *others[:i]]]
        for region in regions:
            paths = tuple(eq.path for eq in places if _region(eq) == region)
            name = (line and function_and_target(*line)) or "saved"
            seen[name] += 1
            name += f" #{seen[name]}" * (seen[name] > 1)
            points.append(Point(name, first.place(), paths, of_layers))
    return points


def gradient_paths(program: object, weights: object) -> list[Path]:
    """The paths of the gradients, in the order of the weights. Raises ValueError if their numbers differ."""
    paths = [eq.path for eq in equations(program) if eq.name == "name" and eq.params["name"] == GRADIENT]
    if len(paths) != len(leaves := jax.tree.leaves(weights)):
        raise ValueError(
            f"the step marks {len(paths)} gradients of {len(leaves)} weights. Name all gradients `{GRADIENT}` with "
            "checkpoint_name, as make_training_step in train.py does."
        )
    return paths
