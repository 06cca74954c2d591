"""One file a family of cases; each defines `WORKLOAD`."""
