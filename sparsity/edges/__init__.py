"""Attention and extrema over the edges of a graph."""
