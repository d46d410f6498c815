"""Compares plans with what compilers and machines say."""
