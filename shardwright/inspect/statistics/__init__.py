"""Activation and gradient statistics of a traced step, and the origin of a NaN."""
