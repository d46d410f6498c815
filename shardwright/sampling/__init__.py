"""Samples text from a model (KV cache, sampler, samples during a run) and computes losses of
texts.
"""
