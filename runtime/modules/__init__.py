"""Other libraries: actions for the moment that they are loaded, and memory that is given back after their use."""
