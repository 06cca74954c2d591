"""Lowerings of products of tokens with the weights of the experts that they chose."""
