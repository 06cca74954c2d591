"""Convolutions whose weights are mostly zeros: finds them in graphs, and replaces them by a kernel that skips zeros."""
