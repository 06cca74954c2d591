"""Finds attention in graphs, and replaces it by operations that skip the keys that its mask hides."""
