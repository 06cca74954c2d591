"""Regions: a product with a sparse weight, and the operations after it. Finds, judges, compiles and replaces them.

contractions → decide, cost → grow_region → matrix_functions → importer → compiled_kernel → build_region → replace_region
"""
