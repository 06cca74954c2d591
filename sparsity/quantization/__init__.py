"""Quantizes sparse models: layers with integer weights."""
