"""Schedules of quantized weights: int8 products with exact sums, and products of grouped integers with floats."""
