"""From linalg to operations of the kernel dialect: encodings, epilogues, formats, schedules."""
