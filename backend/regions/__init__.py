"""A contraction with a sparse weight and its epilogue: found, judged, compiled, put into the graph."""
