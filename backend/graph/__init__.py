"""Questions about an FX graph: inputs, zeros, equal values, views, expressions of constants."""
