"""Asks a coding agent to explain and extend shardwright, and checks what it did."""
