"""Schedules of quantized weights: products of int8 with exact sums."""
