"""Compares a training step on every mesh with one device."""
