"""Tools for writing passes: options, diagnostics, MLIR's own passes, descriptions of schedules."""
