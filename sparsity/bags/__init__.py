"""Bags of rows of embedding tables: their results, their gradients, and optimizer steps for the rows that have gradients."""
