"""All schedules by name, their predicted cost, and the machine that the prediction is for."""
