"""Finds the models that a graph belongs to, and guards on their mode and their zeros."""
