"""What the operations gain over products as torch has them."""

from gossamer.backend.experts.products import Product
from gossamer.backend.graph.nodes import hint

_RATE = 0.7
"""Bytes of weights that the operation reads, for few rows, in the time in which Inductor reads one for a batched product of
gathered weights, which it fuses with the gather (64 experts of 1024 x 512, one token, Zen 5)."""


def predicted_gain(product: Product) -> float | None:
    """How many times faster the operation is predicted to be than a batched product, which reads the weights of an expert once
    for each of its rows. None where nothing predicts it: products with offsets and loops are slower for any number of rows."""
    batched = product.ends is None and product.x is not None
    pairs = None if product.routing is None or not batched else hint(product.routing.pairs)
    if pairs is None:
        return None
    hit = product.experts * (1 - (1 - 1 / product.experts) ** pairs)
    return _RATE * max(1.0, pairs / hit) if hit else None
