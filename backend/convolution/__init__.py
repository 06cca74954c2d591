"""Finds convolutions whose weights are mostly zeros, and replaces them by kernels that skip the zeros."""
