"""Passes that turn linalg into the kernel dialect: encodings, epilogues, formats, schedules."""
