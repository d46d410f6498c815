"""Small runs that compare ideas, seed by seed."""
