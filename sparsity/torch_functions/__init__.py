"""Calls of torch functions with SparseTensors: spellings, refusals, in-place methods, steps of optimizers."""
