"""Lowers attention whose mask hides whole tiles, and attention of a few queries over a cache."""
