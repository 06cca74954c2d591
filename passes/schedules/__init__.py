"""All schedules by name, their predicted cost, and the speed of the machine for which it is predicted."""
