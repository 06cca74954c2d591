"""Lowerings for sparse matrices that are arguments of each call: products by rows, sampled products, segments, edges."""
