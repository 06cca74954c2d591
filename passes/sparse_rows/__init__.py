"""Schedules for sparse matrices that are arguments of a call: products by rows, sampled products, segments, edges."""
