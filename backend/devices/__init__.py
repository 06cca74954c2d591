"""Says what each processor supports, and predicts and watches how fast kernels run on it."""
