"""Memory for arrays: on huge pages, and what is still mapped."""
