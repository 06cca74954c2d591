"""What profiles need of the runtime: names of tensors, and calls that can be watched at no cost otherwise."""
