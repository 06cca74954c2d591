"""What passes are made with: registry entries' options, diagnostics, MLIR's own passes, the description of a schedule."""
