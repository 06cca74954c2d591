"""Convolutions of point clouds: features at coordinates, modules with spconv's names, the maps that layers share."""
