"""Deals with other libraries: runs actions when they are loaded, and gives their memory back after use."""
