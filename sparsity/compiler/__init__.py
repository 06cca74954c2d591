"""Compiles an operation on SparseTensors, and finds the memory for its operands and results."""
