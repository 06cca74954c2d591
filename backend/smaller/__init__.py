"""Removes rows, columns, filters and heads of zeros from Dynamo's graph, before all passes of `graph_passes.py`."""
