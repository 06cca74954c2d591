"""Predicts how much faster Gossamer's operations on experts are than torch's products."""

import torch

from gossamer.backend.experts.products import Product
from gossamer.backend.graph.nodes import hint

_RATES = {torch.bfloat16: 5.0}
_RATE = 0.85
"""With few rows, how fast the operation reads weights, by their type, where 1 is Inductor's speed for a batched product with
gathered weights. Inductor fuses that product with the gather; its kernel for bf16 is slow. Measured on Zen 5 with 64 experts of
1024 x 512 and 1 to 8 tokens: 0.84 to 0.97 in f32, 5 and more in bf16."""


def predicted_gain(product: Product) -> float | None:
    """Returns how many times faster the operation is predicted to be than a batched product. That reads the weight of an expert
    once for each of its rows.

    Returns None if the number of rows is unknown. Also for grouped products with offsets, and for loops: they are slower than
    the operation for any number of rows.
    """
    batched = product.ends is None and product.x is not None
    pairs = None if product.routing is None or not batched else hint(product.routing.pairs)
    if pairs is None:
        return None
    hit = product.experts * (1 - (1 - 1 / product.experts) ** pairs)
    rate = _RATES.get(product.weight.meta["val"].dtype, _RATE)
    return rate * max(1.0, pairs / hit) if hit else None
