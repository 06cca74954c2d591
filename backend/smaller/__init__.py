"""Dynamo's graph made smaller: without rows, columns, filters and heads that are zeros altogether, before all else looks at it."""
