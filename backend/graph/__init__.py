"""Functions that answer questions about an FX graph: its inputs, zeros, equal values, views, and constant expressions."""
