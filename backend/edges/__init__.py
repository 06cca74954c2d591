"""Attention and sums over the edges of a graph: what gather and scatter share with operations on SparseTensors."""
