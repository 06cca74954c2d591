"""Orders: keys sorted by counting, columns by their ranks."""
