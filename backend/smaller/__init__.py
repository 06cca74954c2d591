"""Makes Dynamo's graph smaller before all else looks at it: without rows, columns, filters and heads that are zeros."""
