"""Sharding types and the typed per-device operations on them; see docs/sharding-types.md."""
