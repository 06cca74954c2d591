"""Chains: several regions, and the work between them, as one kernel. Finds, builds and runs them."""
