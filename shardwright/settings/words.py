"""Text that programs show."""

from shardwright_data.foreign import shown


def say(text: str, flush: bool = False) -> None:
    """Prints a text, with no character that a terminal would obey."""
    print(shown(text), flush=flush)
