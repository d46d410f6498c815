"""Measures how fast one device computes: `python -m tools.chip` runs the programs of this folder."""
