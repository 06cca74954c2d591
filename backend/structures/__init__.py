"""Multiplies with the factors of structured matrices, such as Kronecker products, before all passes of `graph_passes.py`."""
