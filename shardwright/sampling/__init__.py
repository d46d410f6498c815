"""Sampling of text from a model: the cache, drawing, the sampler, samples during a run."""
