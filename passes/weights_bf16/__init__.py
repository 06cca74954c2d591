"""Schedules that multiply pairs of bf16, by dot products or by AMX."""
