"""Calls of torch's functions with SparseTensors: spellings, refusals, methods that write, steps of optimizers."""
