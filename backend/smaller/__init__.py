"""Removes rows, columns, filters and heads of zeros from Dynamo's graph, before any other pass sees it."""
