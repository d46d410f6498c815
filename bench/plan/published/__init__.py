"""Compares plans with published runs of other trainers, and fits the constants of the chips to
them.
"""
