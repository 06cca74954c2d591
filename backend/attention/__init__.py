"""Attention with a mask: finds it in graphs, and replaces it by an operation that computes only what the mask leaves."""
