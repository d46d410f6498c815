"""Code that only reads a step: its check, its plan, statistics of its values, compiled operations
by source line.
"""
