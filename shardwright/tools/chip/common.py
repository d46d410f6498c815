"""Shares helpers between the programs of this folder and those in bench/."""

import argparse


def parser_of(page: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose --help shows the docstring of the program's module."""
    return argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)


def first_line(error: Exception) -> str:
    """Returns the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]
