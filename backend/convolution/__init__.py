"""Convolutions whose weight is mostly zeros, found in graphs and given to the kernel that skips them."""
