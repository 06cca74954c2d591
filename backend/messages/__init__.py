"""Gather and scatter over an edge list, taken as operations on sparse matrices."""
