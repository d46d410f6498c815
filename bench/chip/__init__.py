"""Programs of `python -m tools.chip`: what one device computes, and how fast."""
