"""One file a library that computes operations with sparse matrices; each defines `CONTENDER` (see `operations.py`)."""
