"""The models that a graph belongs to: which they are, their mode, and their zeros."""
