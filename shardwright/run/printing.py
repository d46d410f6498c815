"""Prints lines of a run."""

import jax

from shardwright.settings.words import say


def log(text: str) -> None:
    """Prints a text, on process 0 only."""
    if jax.process_index() == 0:
        say(text)
