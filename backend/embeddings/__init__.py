"""Embedding tables in graphs: bags and sums of rows, and gradients of `sparse=True`."""
