"""Models beside the one of train.py. `model.module: gpt2` chooses one."""
