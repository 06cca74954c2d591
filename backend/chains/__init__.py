"""Several regions, and what lies between them, as one kernel: found, built, run."""
