"""Sparse regions outside of Python: their kernels, packed weights and calls as C, for packages of AOTInductor and C libraries."""
