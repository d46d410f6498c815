"""Decides whether a proof of causality for short sequences holds for longer ones.

The program is compared with the same one for shorter sequences, equation by equation: shapes,
parameters, literals and arrays. A number must be the same, or grow with the length: by a fixed
amount for each position, or for each block of positions.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend import core

from shardlib.equations import Eqn, kinds, shape_of
from shardlib.interpret import Operation, arrays_in, operations_in
from shardlib.proof.reach import LOW, are_equal

ROUNDED = 8
"""The number of slots of an expert is rounded to a multiple of this."""


def compared(long: object, short: object, length: int, at: int) -> tuple[str, set[int], bool]:
    """Compares a program for sequences of `length` positions with the same one for `at` positions.

    Returns:
        The first equation that differs, such as `model.py:7: dot_general`; empty if none does.
        The id() of each literal and array of the short program whose numbers count as unknown: they
            neither stay the same nor grow with the length, or only longer sequences reach them.
        True if one of these arrays has another shape in the long program.
    """
    unknown = set()
    arrays = False
    if length == at:
        return "", unknown, arrays
    for x, y in itertools.zip_longest(operations_in(long), operations_in(short)):
        if x is None or y is None or x.name != y.name:
            longer: Any = x or y
            return _named(longer), set(), False
        a, b = x.eqn, y.eqn
        pairs = list(itertools.zip_longest(_sizes(a), _sizes(b)))
        if len(a.invars) != len(b.invars) or any(
            x != y and (None in (x, y) or not _follows(x, y, length, at)) for x, y in pairs
        ):
            return _named(x), set(), False
        end = math.inf if a.primitive.name in kinds("comparison") else length
        literals = [
            (var.val, other.val, other)
            for var, other in zip(a.invars, b.invars, strict=True)
            if isinstance(other, core.Literal)
        ]
        # The proof uses whether numbers are below LOW even if they count as unknown.
        if any(np.less(value, LOW) != np.less(other, LOW) for value, other, _ in literals):
            return _named(x), set(), False
        unknown |= {
            id(var)
            for value, other, var in literals
            if not _is_known(value, other, length, at, end)
        }
    of_long, of_short = list(arrays_in(long)), list(arrays_in(short))
    if len(of_long) != len(of_short):
        return "the number of its constant arrays", set(), False
    for x, y in zip(of_long, of_short, strict=True):
        if not _is_known(x, y, length, at, length):
            unknown.add(id(y))
            arrays |= np.shape(x) != np.shape(y)
    return "", unknown, arrays


def _named(op: Operation) -> str:
    return f"{op.place()}: {op.name}"


def _follows(long: float, short: float, length: int, at: int) -> bool:
    """Returns True if a number grows in proportion to the length, up to a constant summand.

    A proportional number, such as that of the slots of an expert, may be rounded to a multiple of
    ROUNDED. For lengths 64 and 32, 128 and 64 follow, and 72 and 40; 100 and 33 do not.
    """
    if abs(short) < 2:  # such as one block, which no other block sees
        return False
    left = short - long * at / length
    grown, rest = divmod((long - short) * at, length - at)
    if not left or (abs(left) < ROUNDED <= short / 2 and long % ROUNDED == short % ROUNDED == 0):
        return True
    return (
        not rest
        and grown > 0
        and abs(short - grown) < at / 2
        and (grown % at == 0 or at % grown == 0)
    )


def _is_known(long: Any, short: Any, length: int, at: int, end: float) -> bool:
    """Returns True if the numbers of both programs agree, so that they count as known.

    They agree if they grow with the length (`_follows`), or if they are equal and below at / 2: a
    larger number may be a position that only longer sequences reach, or for integers a product of
    positions. Floats of magnitude `end` or more, such as -1e9, are not positions; equal ones agree.
    """
    if not isinstance(getattr(short, "dtype", np.dtype(float)), np.dtype):
        return True  # keys
    if np.shape(long) != np.shape(short):
        return False
    a, b = (np.asarray(x, complex if np.iscomplexobj(x) else float) for x in (long, short))
    if are_equal(a, b).all():
        end = math.inf if np.asarray(short).dtype.kind in "iu" else end
        return not ((np.abs(b) >= at / 2) & (np.abs(b) < end)).any()
    return (
        not b.ndim
        and bool(np.isfinite([a, b]).all())
        and _follows(abs(a.item()), abs(b.item()), length, at)
    )


def _sizes(eqn: Eqn) -> Iterator[int]:
    """Yields the integers in an equation's parameters and in the shapes of its results."""
    parts = [*map(shape_of, eqn.outvars)]
    parts += [
        value for name, value in sorted(eqn.params.items()) if isinstance(value, int | tuple | list)
    ]
    while parts:
        part = parts.pop()
        if isinstance(part, tuple | list):
            parts += part
        elif isinstance(part, int | np.integer):
            yield int(part)
