"""Programs of `python -m tools.chip`: what one device computes, and how fast."""

import time
from collections.abc import Callable

import jax

ROUNDS, CALLS = 5, 5


def best_seconds(call: Callable, *arguments: jax.Array) -> float:
    """Seconds of one call: of ROUNDS rounds of CALLS calls, the best, after a call that is not timed."""
    jax.block_until_ready(call(*arguments))
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([call(*arguments) for _ in range(CALLS)])
        seconds.append((time.perf_counter() - start) / CALLS)
    return min(seconds)


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]
