"""Checkpoints in the files of compressed-tensors 0.11.0. `write.py` made them."""
