"""Replaces look-ups of embedding tables in graphs: bags and sums of rows, and look-ups with `sparse=True`."""
