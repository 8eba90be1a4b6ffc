"""Measures: kernels ← metrics ← compare ← floor; each reads shards, none imports torch."""
