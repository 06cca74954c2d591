"""Message passing over an edge list: turns gather and scatter into operations on sparse matrices."""
