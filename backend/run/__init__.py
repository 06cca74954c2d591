"""The code that runs at every call of a compiled graph: operations that stand for regions, packed weights, sorted edges."""
