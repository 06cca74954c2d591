"""The report as one HTML file: from decisions, tensors and dumped stages, as plain data, to a page that works from disk."""
