"""Attention whose mask hides whole tiles of queries and keys."""
