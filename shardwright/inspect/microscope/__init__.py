"""A traced step run again, to look into it."""
