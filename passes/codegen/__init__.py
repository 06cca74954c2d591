"""From loops to LLVM IR and PTX."""
