"""Proves that a per-device program computes, on its mesh, the blocks of what it computes on one device."""
