"""Lowers several products, and the ops between them, to one kernel."""
