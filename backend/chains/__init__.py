"""Finds, times, builds and replaces chains: several products and the work between them, as one kernel."""
