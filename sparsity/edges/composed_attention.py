"""Composes attention over the edges of a graph from SDDMM, softmax of rows, and SpMM, one head at a time.

It is for CUDA devices, and for results that no kernel computes: tangents, and gradients that are differentiated again. Forward
and backward use arrays of heads x entries while they run. Forward keeps none of them, so backward computes the weights anew.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.sparsity.arrays.row_form import row_form, sorted_by_rows
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Bound, dense
from gossamer.sparsity.edges import dropout_mask
from gossamer.sparsity.edges.edge_attention import NAMES, Terms, given_terms, widened
from gossamer.sparsity.operations.dense_results import einsum, sample
from gossamer.sparsity.operations.segments import segment_reduce, segment_softmax, softmax_backward, spread


def attend_edges(positions: Tensor, coordinates: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Computes `gossamer::attend_edges`. The statistics are zeros, because backward needs none."""
    *terms, seed, scale, slope, dropout = rest
    attention = _Attention(positions, coordinates, widened(given_terms(terms)), scale, slope)
    values = attention.terms["values"]
    weights = attention.weights(attention.scores(attention.products()))
    out = attention.sums(attention.kept(weights, seed, dropout), values)
    return out.to(terms[0].dtype), values.new_zeros([attention.shape[0], 2, values.shape[1]])


def attend_edges_backward(
    gradient: Tensor, out: Tensor, statistics: Tensor, positions: Tensor, coordinates: Tensor, *rest: Any
) -> list[Tensor]:
    """Computes `gossamer::attend_edges_backward`."""
    *terms, seed, scale, slope, dropout, needs = rest
    attention = _Attention(positions, coordinates, widened(given_terms(terms)), scale, slope)
    wanted = [name for name, needed in zip(NAMES, needs, strict=True) if needed]
    found = attention.gradients(gradient.to(statistics.dtype), set(wanted), seed, dropout)
    return [found[name].to(terms[0].dtype) for name in wanted]


class _Attention:
    """The steps of one call. Values of entries are [heads, entries]; terms are those of `attend_edges`."""

    def __init__(self, positions: Tensor, coordinates: Tensor, terms: Terms, scale: float, slope: float) -> None:
        self.positions, self.coordinates = positions.contiguous(), coordinates.contiguous()
        self.terms, self.scale, self.slope = terms, scale, slope
        self.directed = "direction" in terms
        self.shape = positions.numel() - 1, terms["values"].shape[0]
        self.rows = spread(positions, torch.arange(self.shape[0], device=positions.device), coordinates.numel())
        self.format = Format.CSR.with_widths(positions.dtype.itemsize * 8, coordinates.dtype.itemsize * 8)

    def products(self) -> Tensor | None:
        """Returns the products of queries and keys, or of the direction and the activated sums; None if there are no keys."""
        if self.directed:
            pairs = zip(self.joined(), self.terms["direction"], strict=True)
            return torch.stack([self._leaky(joined, joined) @ direction for joined, direction in pairs])
        return self.dots(self.terms["queries"], self.terms["keys"]) if "keys" in self.terms else None

    def joined(self) -> Iterator[Tensor]:
        """Yields, for each head, the query plus the key of every entry, [entries, size]."""
        for queries, keys in zip(self.terms["queries"].unbind(1), self.terms["keys"].unbind(1), strict=True):
            yield queries.index_select(0, self.rows) + keys.index_select(0, self.coordinates)

    def scores(self, products: Tensor | None) -> Tensor:
        """Returns the inputs of the softmax. Without a direction, leaky_relu still comes between."""
        values, t = self.terms["values"], self.terms
        scores = values.new_zeros(values.shape[1], self.coordinates.numel())
        if products is not None:
            scores = self._weighted(products) * self.scale
        if "target" in t:
            scores = scores + t["target"].t().index_select(1, self.rows)
        if "source" in t:
            scores = scores + t["source"].t().index_select(1, self.coordinates)
        return scores + t["edge"].t() if "edge" in t else scores  # a vector is its own transpose; all heads share it

    def weights(self, scores: Tensor) -> Tensor:
        """Returns the softmax of each row."""
        activated = scores if self.directed else self._leaky(scores, scores)
        return torch.stack([segment_softmax(self.positions, head) for head in activated.unbind(0)])

    def _leaky(self, raw: Tensor, value: Tensor) -> Tensor:
        """Returns the value, times the slope where raw is not positive. Slope 0 is relu, which makes 0 of infinity."""
        return torch.where(raw > 0, value, value * self.slope) if self.slope else torch.where(raw <= 0, 0.0, value)

    def kept(self, weights: Tensor, seed: Tensor | None, dropout: float) -> Tensor:
        """Returns the weights after dropout. A seed drops the same weights at every call, and in kernels."""
        if seed is None:
            return weights
        heads, entries = weights.shape
        return weights * dropout_mask.kept(seed, entries, heads, dropout, weights.dtype).t()

    def gradients(self, gradient: Tensor, wanted: set[str], seed: Tensor | None, dropout: float) -> Terms:
        """Returns the gradients of the wanted terms, from the gradient of the result."""
        products = self.products()
        scores = self.scores(products)
        weights = self.weights(scores)
        found: Terms = {}
        if "values" in wanted:
            found["values"] = self.sums(self.kept(weights, seed, dropout), gradient, across=True)
        if wanted <= {"values"}:
            return found
        of_weights = self.kept(self.dots(gradient, self.terms["values"]), seed, dropout)
        pairs = zip(of_weights.unbind(0), weights.unbind(0), strict=True)
        of_scores = torch.stack([softmax_backward(self.positions, *pair) for pair in pairs])
        if not self.directed:
            of_scores = self._leaky(scores, of_scores)
        if "target" in wanted:
            found["target"] = torch.stack([segment_reduce(self.positions, head, "sum") for head in of_scores.unbind(0)], 1)
        if "source" in wanted:
            ones = gradient.new_ones(self.shape[0], gradient.shape[1], 1)
            found["source"] = self.sums(of_scores, ones, across=True).squeeze(2)
        if "edge" in wanted:
            found["edge"] = of_scores.sum(0) if self.terms["edge"].dim() == 1 else of_scores.t()
        if "weight" in wanted:
            assert products is not None
            found["weight"] = self.scale * (of_scores * products).sum(0)
        if not wanted & {"queries", "keys", "direction"}:
            return found
        of_products = self.scale * self._weighted(of_scores)
        if self.directed:
            return found | self._of_joined(of_products, wanted)
        if "queries" in wanted:
            found["queries"] = self.sums(of_products, self.terms["keys"])
        if "keys" in wanted:
            found["keys"] = self.sums(of_products, self.terms["queries"], across=True)
        return found

    def _of_joined(self, of_products: Tensor, wanted: set[str]) -> Terms:
        """Returns the wanted gradients of queries, keys and direction, from that of the products."""
        found: dict[str, list[Tensor]] = {name: [] for name in ("queries", "keys", "direction") if name in wanted}
        for joined, direction, weights in zip(self.joined(), self.terms["direction"], of_products, strict=True):
            if "direction" in found:
                found["direction"].append(weights @ self._leaky(joined, joined))
            slopes = self._leaky(joined, direction)
            for dim, name in enumerate(("queries", "keys")):
                if name in found:
                    found[name].append(self._over_entries(dim, weights, slopes))
        return {name: torch.stack(heads, 0 if name == "direction" else 1) for name, heads in found.items()}

    def _over_entries(self, dim: int, weights: Tensor, x: Tensor) -> Tensor:
        """Returns sums of weights times x [entries, n] over the entries of each row, or column for `dim` 1."""
        pattern = self.format, dim, self.shape, (self.positions, self.coordinates, weights)
        form = row_form(*pattern) or sorted_by_rows(*pattern)
        numbers = torch.arange(weights.numel(), device=weights.device) if form.order is None else form.order.long()
        format = form.format.with_widths(form.positions.dtype.itemsize * 8, 64)
        shape = form.positions.numel() - 1, weights.numel()
        matrix = Bound(Operand("ip", format), (form.positions, numbers, form.values(weights)), shape)
        return einsum([matrix, dense("pk", x)], "ik")

    def dots(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns, at each entry, the dot products of rows of a [rows, heads, n] and b [columns, heads, n]."""
        pattern = self._bound(a.new_empty(1).expand(self.coordinates.numel()))
        pairs = zip(a.unbind(1), b.unbind(1), strict=True)
        return torch.stack([sample(pattern, [dense("ik", left), dense("jk", right)]) for left, right in pairs])

    def sums(self, weights: Tensor, x: Tensor, across: bool = False) -> Tensor:
        """Returns sums [rows, heads, n] of weights times rows of x [columns, heads, n]. `across` exchanges rows and columns."""
        of, to = ("i", "j") if across else ("j", "i")
        heads = zip(weights.unbind(0), x.unbind(1), strict=True)
        return torch.stack([einsum([self._bound(w), dense(f"{of}k", rows)], f"{to}k") for w, rows in heads], 1)

    def _weighted(self, entries: Tensor) -> Tensor:
        return entries * self.terms["weight"] if "weight" in self.terms else entries

    def _bound(self, values: Tensor) -> Bound:
        return Bound(Operand("ij", self.format), (self.positions, self.coordinates, values), self.shape)
