"""Attention under masks: which tiles of queries and keys a mask leaves, and the operation that computes only those."""
