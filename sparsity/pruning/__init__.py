"""From a dense model to an accurate sparse one: which weights to keep, and what they become."""
