"""TorchSparse's names (2.1) for convolutions of points, on the maps and kernels of `nn`."""
