"""Convolutions of points: rows of features that a map of pairs gathers and adds to."""
