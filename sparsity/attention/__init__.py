"""Attention under masks: which tiles of queries and keys there are, and the operation that computes only those."""
