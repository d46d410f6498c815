"""Checks of settings, and tools as programs."""
