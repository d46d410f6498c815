"""Prints lines of a run."""

import jax

from shardwright.settings.output import say


def log(text: str) -> None:
    """Prints a text, on process 0 only, and flushes it, because a long wait may follow."""
    if jax.process_index() == 0:
        say(text, flush=True)
