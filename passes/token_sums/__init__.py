"""Sums over tokens at the nonzeros of a pattern, as in gradients of sparse weights, and the layouts for them."""
