"""Calibration of the cost model, measurement of schedules (max-autotune), and the database of measured times."""
