"""The contestants of benchmarks/throughput.py: one module each, all training the same model on the same tokens."""
