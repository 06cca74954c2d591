"""TorchSparse's functions that make voxels of points, and batches of samples."""

from gossamer.torchsparse.utils import collate, quantize

__all__ = ["collate", "quantize"]
