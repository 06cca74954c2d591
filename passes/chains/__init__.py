"""Several products, with what lies between them, as one kernel."""
