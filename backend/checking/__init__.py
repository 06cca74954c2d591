"""Compares compiled graphs with torch, and finds the part of a graph that differs. Option `check` and gossamer.bisect use
it."""
