"""Functions that layers of experts need when they run: the tokens of each expert, and its activation."""
