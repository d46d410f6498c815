"""Muon, the learning rate, the settings of both, and stochastic rounding. AdamW is in train.py."""
