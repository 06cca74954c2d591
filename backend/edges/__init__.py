"""Attention over the edges of a graph, however a graph of operations spells it."""
