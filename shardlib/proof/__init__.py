"""Proves that a per-device program computes the blocks of what it computes on one device.

The blocks are those of its mesh.
"""
