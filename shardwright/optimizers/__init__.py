"""Muon, the learning rate, and the settings of both. AdamW is in train.py."""
