"""Makes an accurate sparse model of a dense one: chooses the weights to keep, and computes their values."""
