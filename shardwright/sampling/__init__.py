"""Sampling of text from a model: the cache, the sampler, losses of texts, samples during a run."""
