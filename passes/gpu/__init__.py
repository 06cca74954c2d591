"""Passes for GPUs: one file for each schedule, and those that lower kernels to PTX. None has run on a GPU yet."""
