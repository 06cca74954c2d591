"""Schedules of operations whose matrices come with each call: rows, dots, segments, edges, sorting."""
