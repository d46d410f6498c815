"""Everything around the training step: configuration, launch, checkpoints, metrics, profile,
pipeline stages.
"""
