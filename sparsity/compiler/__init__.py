"""From an operation to compiled code, and the memory that it runs in."""
