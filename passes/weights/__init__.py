"""Schedules of products with a sparse weight; each file has a schedule and its lowering."""
