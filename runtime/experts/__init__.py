"""Functions that layers of experts call when they run: they find the tokens of each expert, and compute its activation."""
