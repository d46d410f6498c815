"""Checks of settings, differences between configurations, and tools as programs."""
