"""Other models than that of train.py, named by model.module."""
