"""From a dense model to an accurate sparse one: which weights of a layer to keep, and what they become, from what it computes."""
