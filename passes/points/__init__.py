"""Lowerings of convolutions of points, which gather rows of features by a map of pairs and add up."""
