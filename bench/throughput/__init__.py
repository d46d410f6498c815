"""Compares training steps of shardwright with those of other trainers."""
