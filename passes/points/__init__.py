"""Convolutions of points: kernels that gather rows of features by a map of pairs, and add up."""
