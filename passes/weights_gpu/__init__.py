"""Schedules of products with a sparse weight on GPUs."""
