"""Sparse regions outside of Python: kernels, packed weights and calls as C, for packages of AOTInductor and for libraries."""
