"""Passes for convolutions with a sparse weight, from contract IR to loops."""
