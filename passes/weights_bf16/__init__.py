"""Schedules that multiply pairs of bf16 numbers, by dot products or by AMX."""
