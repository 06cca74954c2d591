"""The arrays of packings, from the places of nonzeros."""
