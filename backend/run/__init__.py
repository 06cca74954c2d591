"""What runs on every call of a compiled graph: the operations that stand for regions, packed weights, edges in order."""
