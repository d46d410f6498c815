"""Activation and gradient statistics of a traced step, and where a NaN comes from."""
