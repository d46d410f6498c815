"""The contestants of benchmarks/throughput: one module each, all training the same model on the same tokens."""
