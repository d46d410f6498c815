"""Data of a run: text and tokenizers, flat-tokens datasets, batches; and safe reading of untrusted
files.
"""
