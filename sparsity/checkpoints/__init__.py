"""Saves and loads sparse models: nonzeros and their places, in safetensors files."""
