"""Functions that answer questions about an FX graph: its inputs, zeros, equal values, views, and constant expressions.

inputs, names       static inputs, their real values and names
nodes, layout       single nodes, and chains of views
patterns            matching of expressions; backward_part finds the gradients of a match
expressions         computations that depend only on static inputs; weight_expressions, edge_expressions
emit                adds nodes
"""
