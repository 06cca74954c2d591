"""Questions about an FX graph: its inputs, zeros, equal values, views, and expressions of constants."""
