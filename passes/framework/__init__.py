"""The tools that passes are made with: options, diagnostics, MLIR's own passes, descriptions of schedules."""
