"""Sparse models on disk: nonzeros and their places, in safetensors files."""
