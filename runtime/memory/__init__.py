"""Memory for arrays: huge pages for large arrays, and memory of earlier results for new results."""
