"""From linalg to the kernel dialect: encodings, epilogues, formats, schedules."""
