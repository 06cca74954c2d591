"""Bags of rows of embedding tables, and steps of optimizers for such rows."""
