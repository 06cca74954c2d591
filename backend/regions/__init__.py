"""Regions: finds a product with a sparse weight and the work after it, decides, compiles, and replaces it in the graph."""
