"""Multiplies with the factors of structured matrices, such as Kronecker products, before all other passes run."""
