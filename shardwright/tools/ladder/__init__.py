"""Carries settings from a small model to large ones."""
