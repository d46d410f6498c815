"""The trainer around train.py: settings, devices and processes, the run and its files, what models share, sampling."""
