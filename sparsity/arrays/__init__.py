"""The arrays of a stored matrix: entries, rows, slices, sorting."""
