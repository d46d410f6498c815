"""The page of a run, and of several side by side."""
