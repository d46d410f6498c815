"""Tokenizes text into a flat-tokens dataset."""
