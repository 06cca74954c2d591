"""TorchSparse's names (2.1) for convolutions of points, with the maps and kernels of `nn`."""
