"""Lowerings that sort: keys by counting, columns by their ranks."""
