"""Lowers several products, and the work between them, to one kernel."""
