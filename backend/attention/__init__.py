"""Dense attention with a mask, found in graphs and given to the operation that skips what the mask hides."""
