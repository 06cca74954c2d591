"""The arrays of a sparse matrix: entries, rows, slices, sorting."""
