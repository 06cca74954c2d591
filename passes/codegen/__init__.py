"""Passes that lower loops to LLVM IR: math functions, pointers to arrays, threads, and the function that callers use."""
