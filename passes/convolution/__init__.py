"""Convolutions with a sparse weight: from contract IR to loops."""
