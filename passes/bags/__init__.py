"""Lowerings of bags of rows of embedding tables, and of steps of optimizers for such rows."""
