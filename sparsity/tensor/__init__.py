"""SparseTensor, and what torch's functions do with it."""
