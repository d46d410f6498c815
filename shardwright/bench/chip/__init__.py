"""Measures how fast one device computes. `python -m tools.chip` runs these programs."""
