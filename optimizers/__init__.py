"""Muon, the learning rate, and their settings. AdamW is in train.py."""
