"""Recognises attention over the edges of a graph, for both spellings: gather and scatter, and operations on SparseTensors."""
