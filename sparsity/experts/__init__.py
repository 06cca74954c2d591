"""Layers in which each token chooses experts: products with the weights of the chosen ones, and whole mixtures of experts."""
