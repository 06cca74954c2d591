"""Sparse models on disk: their nonzeros and where they are, in safetensors."""
