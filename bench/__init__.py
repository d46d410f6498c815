"""Measures what maintainers compare: other trainers, compilers, scale. Only in a clone."""
