"""All passes for GPUs: one file for each schedule, and the way to PTX. None has run on a GPU yet."""
