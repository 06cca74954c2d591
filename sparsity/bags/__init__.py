"""Bags of rows of embedding tables: their results, their gradients, and steps of optimizers for the rows that have one."""
