"""Lowerings of sums over tokens at a pattern's nonzeros, as in gradients of sparse weights, and of the layouts for them."""
