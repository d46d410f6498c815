"""Compares plans with compilers and measurements."""
