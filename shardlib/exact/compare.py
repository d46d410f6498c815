"""Compares what two programs compute on the same inputs, in exact arithmetic."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardlib.exact import ring
from shardlib.exact.endings import Undecided
from shardlib.exact.inputs import draw
from shardlib.exact.machine import Machine, Observer
from shardlib.exact.values import Exact, equal, is_float, join, move

SEEDS = (0, 1, 2)
DRAWS = "draws"
"""The axis of a mesh along which devices get other arguments."""
Function = Callable[..., Any]
Run = tuple[Machine, Sequence[Exact]]
"""A machine, and the results of a program that it ran."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """What differs between two programs.

    Attributes:
        text: such as `result 0: 100% of 512 entries differ`, or a problem with its place.
        result: the number of the result that differs; None: something else is wrong.
    """

    text: str
    result: int | None = None


def run(
    program: Any, sizes: Mapping[str, int], args: Sequence[Any], observe: Observer | None = None
) -> tuple[Machine, list[Exact]]:
    """Runs a jaxpr on whole arrays, on all devices of a mesh with axes of these sizes.

    Returns:
        The machine, with the problems that it noted, and the results.

    Raises:
        Undecided: a primitive has no rule.
        Wrong: the program cannot run on these devices.
    """
    machine = Machine(dict(sizes), observe)
    return machine, machine.run(program, [machine.whole(arg) for arg in args])


def run_draws(
    program: Any,
    sizes: Mapping[str, int],
    draws: Sequence[Sequence[Any]],
    observe: Observer | None = None,
    is_reversed: bool = False,
) -> tuple[Machine, list[Exact]]:
    """Runs a jaxpr on several lists of arguments at once: they are an axis of the mesh, DRAWS.

    Decisions by one float are reversed if `is_reversed` (see Machine). See `run`.
    """
    machine = Machine({DRAWS: len(draws), **sizes}, observe, is_reversed)
    args = [
        join(np.concatenate, [*map(machine.whole, arrays)]) for arrays in zip(*draws, strict=True)
    ]
    return machine, machine.run(program, args)


def compare(
    program: Any,
    other: Any,
    sizes: Mapping[str, int],
    args: Sequence[Any],
    other_sizes: Mapping[str, int] | None = None,
) -> list[Difference]:
    """Finds which results of two programs differ on these inputs.

    Args:
        program: a jaxpr, traced for a mesh.
        other: the jaxpr of the program that is right.
        sizes: number of devices along each axis of the mesh of `program`.
        args: whole arrays.
        other_sizes: those of the mesh of `other`; None: one device along each axis.

    Raises:
        Undecided: a primitive has no rule.
        Wrong: a program cannot run on these devices.
    """
    here, outs = run(program, sizes, args)
    there, expected = run(other, other_sizes or dict.fromkeys(sizes, 1), args)
    return compare_results(here, outs, there, expected)


def compare_results(
    here: Machine, outs: Sequence[Exact], there: Machine, expected: Sequence[Exact]
) -> list[Difference]:
    """Finds which results of two runs differ, and what else the first machine noted."""
    found = [Difference(problem) for problem in here.problems]
    for i, (a, b) in enumerate(zip(outs, expected, strict=True)):
        a, b = (_by_draws(*pair) for pair in ((here, a), (there, b)))
        if a.value.shape[1:] != b.value.shape[1:]:
            found.append(Difference(f"result {i} has another shape", i))
            continue
        differs = ~equal(a, b)
        if differs.any():
            text = f"result {i}: {differs.mean():.0%} of {differs.size} entries differ"
            found.append(Difference(text, i))
    return found


def not_compared(runs: Sequence[Run]) -> list[Difference]:
    """Finds entries of results that are NaN in all runs and their draws: they say nothing."""
    found = []
    for i, results in enumerate(zip(*(outs for _, outs in runs), strict=True)):
        if results[0].value.dtype.kind not in "fc":
            continue
        pairs = zip((machine for machine, _ in runs), results, strict=True)
        is_nan = np.concatenate([np.isnan(_by_draws(m, x).value) for m, x in pairs]).all(0)
        if is_nan.any():
            part = "" if is_nan.all() else f"{is_nan.mean():.0%} of {is_nan.size} entries are "
            text = f"{part}NaN in all inputs that were run, so nothing was compared"
            found.append(Difference(f"result {i}: {text}", i))
    return found


def with_positive(inputs: Sequence[list[Any]], runs: Sequence[Run]) -> Iterator[list[Any]]:
    """Yields inputs, and while `runs`, which grow, were all NaN: the first two made positive."""
    yield from inputs
    for args in inputs[:2]:
        if not_compared(runs):
            yield [np.abs(x) if is_float(x.dtype) else x for x in args]


def _by_draws(machine: Machine, x: Exact) -> Exact:
    """Returns a result of a program, which all devices have, with one leading dim, of draws."""
    return move(lambda a: a.reshape(-1, *a.shape[machine.rank :]), x)


def digest_of(xs: Sequence[Exact]) -> str:
    """Hashes arrays. Those that are `equal` have the same hash."""
    found = hashlib.sha256()
    for x in xs:
        entries = x.value if x.image is None else x.image % ring.COMPARED
        found.update(f"{entries.shape}{entries.dtype}".encode() + entries.tobytes())
    return found.hexdigest()[:16]


def without_devices(machine: Machine, x: Exact) -> Exact:
    """Returns a result of a program, which all devices have, without the leading dims."""
    return move(lambda a: a.reshape(a.shape[machine.rank :]), x)


def differences(
    function: Callable[..., Any],
    other: Callable[..., Any],
    *args: Any,
    seeds: Sequence[int] = SEEDS,
) -> list[Difference]:
    """Finds where two functions differ, on drawn inputs like `args`.

    Both are traced and run in exact arithmetic, on the current mesh if they have a shard_map.

    Args:
        function: any function of arrays that JAX can trace.
        other: a function with the same arguments and results.
        *args: arrays, jax.ShapeDtypeStruct, or pytrees of them. Only their types are used.
        seeds: an input is drawn for each; the probability that two functions differ and have equal
            results is about 1e-7 for each entry of a result and each seed.

    Raises:
        ValueError: the results have other types or another structure.
        Undecided: a primitive has no rule, or entries of a result are NaN on all inputs.
    """
    types = jax.tree.map(jax.typeof, args)
    programs = [jax.make_jaxpr(f, return_shape=True)(*types) for f in (function, other)]
    (program, results), (expected, expected_results) = programs
    if jax.tree.structure(results) != jax.tree.structure(expected_results):
        raise ValueError(
            f"the functions return {results} and {expected_results}: compare functions whose "
            "results have the same structure"
        )
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    runs: list[Run] = []
    for inputs in with_positive([draw(program.in_avals, seed) for seed in seeds], runs):
        runs.append(run(expected, sizes, inputs))
        if found := compare_results(*run(program, sizes, inputs), *runs[-1]):
            return found
    if texts := [found.text for found in not_compared(runs)]:
        raise Undecided("; ".join(texts))
    return []


def same(
    function: Callable[..., Any],
    other: Callable[..., Any],
    *args: Any,
    seeds: Sequence[int] = SEEDS,
) -> bool:
    """Returns True if two functions compute the same, apart from rounding.

    >>> x = jnp.ones((4, 8))
    >>> same(jax.nn.silu, lambda x: x / (1 + jnp.exp(-x)), x)
    True
    >>> same(jax.nn.silu, jax.nn.gelu, x)
    False

    See `differences` for arguments and errors.
    """
    return not differences(function, other, *args, seeds=seeds)
