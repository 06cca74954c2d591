"""Compiles operations on SparseTensors from contract IR to kernels, and manages memory for their operands and results."""
