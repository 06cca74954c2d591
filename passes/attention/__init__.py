"""Lowers attention whose mask hides whole tiles of queries and keys."""
