"""From points to a batch."""

from gossamer.torchsparse.utils import collate, quantize

__all__ = ["collate", "quantize"]
