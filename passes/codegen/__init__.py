"""From loops to LLVM IR: math, storage as pointers, threads, the entry that callers use."""
