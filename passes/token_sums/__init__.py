"""Lowerings of sums over tokens at the nonzeros of a pattern, as in gradients of sparse weights, and of the layouts for them."""
