"""Support for profiles: names of tensors, and calls that profilers can watch. Unwatched calls take no longer."""
