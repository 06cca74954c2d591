"""Sparsity that is made in training: what to keep, when, where and in which pattern, beside any optimizer."""
