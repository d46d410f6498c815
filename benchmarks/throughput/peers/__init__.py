"""The contestants of benchmarks/throughput, one module each. All train the same model on the same tokens."""
