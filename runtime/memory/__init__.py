"""Memory for arrays: huge pages for large ones, and pages of earlier results for new results."""
