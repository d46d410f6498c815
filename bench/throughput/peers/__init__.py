"""The contestants of bench/throughput, one module each.

All train the same model on the same tokens.
"""
