"""Builders of loops for lowerings: vectors, tiles, epilogues, shares of rows, threads of GPUs."""
