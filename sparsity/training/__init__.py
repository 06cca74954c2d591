"""Sparse training with any optimizer: recipes say which weights to keep, when to choose them, and in which pattern."""
