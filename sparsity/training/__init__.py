"""Sparse training with any optimizer: which weights to keep, when to choose them, and in which pattern."""
