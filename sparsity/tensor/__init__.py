"""SparseTensor, and the implementations of torch's functions for it."""
