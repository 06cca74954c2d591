"""Calls of torch functions with SparseTensors: argument spellings, torch's errors, in-place methods, steps of optimizers."""
