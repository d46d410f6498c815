"""Proves that each device computes its blocks of what the program computes on one device."""
