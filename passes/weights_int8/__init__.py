"""Schedules of quantized weights: products of int8 with exact sums, and of groups of integers with floats."""
