"""Makes the arrays of packings from the places of nonzeros."""
