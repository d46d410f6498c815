"""Parts that models share: their interface and weights, attention, RoPE, FP8, the loss in
chunks.
"""
