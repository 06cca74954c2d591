"""Recognises norms of each head of queries or keys %x, [B, S, H, D] or [B, H, S, D], in this form:

    mul(%w, mul(%x, rsqrt(add(mean(pow(%x, 2), [-1], True), 1e-6))))

There may be conversions from narrow floats and back between these. %w has a number for each column of a head. This is query-key
normalization (Henry et al., 2020) by root mean squares, as in Qwen 3 and Gemma 3.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.chains.heads import PerHead, cuts
from gossamer.backend.graph.nodes import between, same_dtype
from gossamer.backend.graph.patterns import LAST, Hole, Number, average, in_any_type, match, rsqrt, square, unrounded
from gossamer.backend.regions.matrix_functions import Extra


@dataclass(frozen=True)
class HeadNorm(PerHead):
    """Divides each head by sqrt(mean of its squares + eps), then multiplies its columns with a weight."""

    operation: ClassVar[str] = "normalize"

    eps: float

    @property
    def numbers(self) -> dict[str, Any]:
        """The attributes of all such operations, and `eps`."""
        return {**super().numbers, "eps": self.eps}


def _is_vector(of: Any) -> bool:
    return isinstance(of, fx.Node) and of.meta["val"].dim() == 1


_X, _WEIGHT, _EPS = Hole("x", lambda of: isinstance(of, fx.Node)), Hole("weight", _is_vector), Number("eps")

_NORM = in_any_type(_WEIGHT * in_any_type(_X * rsqrt(average(square(_X), LAST) + _EPS)))


def find_head_norm(node: fx.Node) -> HeadNorm | None:
    """Returns the norm whose result is this node; None if there is none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or not isinstance(value.shape[-1], int):
        return None
    found = match(_NORM, node)
    if found is None or tuple(found["weight"].meta["val"].shape) != (value.shape[-1],):
        return None
    x = unrounded(found["x"])
    inner = between([x], node)
    narrowed = any(each.meta["val"].dtype.itemsize < x.meta["val"].dtype.itemsize for each in inner)  # less precise than x
    if narrowed or not same_dtype(x, node):
        return None
    for roles, heads, views in cuts(x, None):
        members = tuple(dict.fromkeys((*views, *inner)))
        return HeadNorm(heads, node, roles, members, (Extra(found["weight"], "vector"),), found["eps"])
    return None
