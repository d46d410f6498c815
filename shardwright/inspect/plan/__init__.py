"""Predicts what a training step will cost, from its traced program: time, memory, communication, by
source line.
"""
