"""Calibration of the cost model, max-autotune, and the database of what was measured."""
