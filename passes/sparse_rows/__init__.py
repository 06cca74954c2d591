"""Schedules of operations whose sparse matrices come with each call: products by rows, samples, segments, edges."""
