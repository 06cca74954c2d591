"""Attention, maxima and minima over the edges of a graph, and edge lists sorted into CSR."""
