"""Schedules of products with a sparse weight; each is a file with its lowering."""
