"""A run as a model of `transformers`, with its card, on disk and on the hub."""
