"""All schedules by name, what they cost, and on which machine."""
