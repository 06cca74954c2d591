"""What each processor supports, and the predicted cost of kernels on it."""
