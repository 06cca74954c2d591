"""Layers whose tokens choose experts: products with the weights of the chosen ones, and whole mixtures of experts."""
