"""Replays steps of a run."""
