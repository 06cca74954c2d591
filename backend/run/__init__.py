"""Code that runs at every call of a compiled graph: the operations that call regions, packed weights, sorted edges."""
