"""Converts models to and from transformers, for the export and import programs."""
