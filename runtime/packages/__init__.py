"""The metadata of packages of compiled models."""
