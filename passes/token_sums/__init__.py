"""Sums over tokens at the entries of a pattern, as gradients of sparse weights are, and what lays values out for them."""
