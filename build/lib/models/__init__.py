"""Models other than that of train.py, chosen by model.module."""
