"""Convolutions of point clouds: features at coordinates, modules with spconv's names, and maps shared between layers."""
