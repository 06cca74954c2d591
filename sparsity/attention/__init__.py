"""Attention under masks: finds the tiles of queries and keys that a mask does not hide, and computes only those."""
