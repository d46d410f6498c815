"""What models share: what a model is, its weights, attention paths, RoPE, FP8, the loss in chunks."""
