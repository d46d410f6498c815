"""Code that only reads a step: its proof, its plan, statistics of its values, compiled operations by source line."""
