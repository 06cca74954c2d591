"""Makes an accurate sparse model of a dense one: which weights to keep, and which values they get."""
