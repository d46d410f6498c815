"""A run: its configuration, start, checkpoints, metrics, profile and stages."""
