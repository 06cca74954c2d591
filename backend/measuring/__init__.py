"""Calibrates the cost model, measures schedules, and keeps measured times on disk."""
