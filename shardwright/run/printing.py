"""Prints lines of a run."""

import jax

from shardwright.settings.words import say


def log(text: str) -> None:
    """Prints a text, on process 0 only. It is shown at once, also in a file, because a wait may follow."""
    if jax.process_index() == 0:
        say(text, flush=True)
