"""Compares the programs that two versions of the source run."""
