"""Text from a model: the cache, drawing, the sampler, texts during a run."""
