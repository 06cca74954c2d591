"""Computes attention over the edges of a graph as one operation, without an array of edges x heads.

Forward keeps two numbers for each node and head. Backward computes the weights again: by rows of the pattern for gradients of
rows and entries, and by rows of its transpose for gradients of columns (Dao et al., "FlashAttention", 2022, on a sparse
pattern). It also draws the numbers of dropout again, from a seed. Graph attention networks: Veličković et al., 2018; with a
direction: Brody et al., "How attentive are graph attention networks?", 2022; graph transformers: Shi et al., 2021.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.edges import GRADIENTS
from gossamer.dialects.errors import GossamerError
from gossamer.dialects.format import Format
from gossamer.runtime.memory.warm_memory import empty
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.arrays.row_form import RowForm, row_form, sorted_by_rows
from gossamer.sparsity.compiler import attention_ir
from gossamer.sparsity.compiler.attention_ir import Attention
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.edges.tiled_edges import attend_tiled, tiled_gradients
from gossamer.sparsity.operations.matrix_calls import ByRows
from gossamer.sparsity.operations.open_sizes import agree

NAMES = ("values", "target", "source", "edge", "queries", "keys", "weight", "direction")
"""The terms of the operation, in the order of its arguments."""
_SHAPES = {
    "values": "jhf", "target": "ih", "source": "jh", "edge": "ph", "queries": "ihd", "keys": "jhd", "weight": "p",
    "direction": "hd",
}  # fmt: skip

MOST_FEATURES = 2048
"""The most features of a head, because the kernel unrolls its sums."""

Terms = dict[str, Tensor]


def attend_edges(
    positions: Tensor,
    coordinates: Tensor,
    values: Tensor,
    *,
    target: Tensor | None = None,
    source: Tensor | None = None,
    edge: Tensor | None = None,
    queries: Tensor | None = None,
    keys: Tensor | None = None,
    weight: Tensor | None = None,
    direction: Tensor | None = None,
    scale: float = 1.0,
    slope: float = 1.0,
    dropout: float = 0.0,
) -> Tensor:
    """Returns out[i, h] = sum over the entries p = (i, j) of row i of softmax_p(z[p, h]) * values[j, h], where

    z[p, h] = leaky_relu(target[i, h] + source[j, h] + edge[p, h] + scale * weight[p] * <queries[i, h], keys[j, h]>, slope)
    or, with a direction,
    z[p, h] = target[i, h] + source[j, h] + edge[p, h]
              + scale * weight[p] * <direction[h], leaky_relu(queries[i, h] + keys[j, h], slope)>

    positions    [rows + 1] and coordinates [entries], int32 or int64: the pattern in CSR, checked by the caller
    values       [columns, heads, features]; all terms have the same float dtype; sums of narrow floats are in float32
    target       [rows, heads]                source  [columns, heads]
    edge         [entries, heads] or [entries], in the order of the pattern
    queries      [rows, heads, size]          keys    [columns, heads, size]
    weight       [entries], needs queries and keys
    direction    [heads, size], needs queries and keys
    slope        the slope of leaky_relu; 1 for no leaky_relu
    dropout      the share of weights in [0, 1) that are set to 0; the others are divided by the remaining share. torch's
                 generator draws them at every call

    Terms may be left out. The result is [rows, heads, features]; rows without entries give 0. Duplicate entries count twice. It
    is differentiable in all terms (see attention_derivatives). GossamerError for shapes that do not fit.
    """
    terms = (values, target, source, edge, queries, keys, weight, direction)
    _check(positions, coordinates, dict(zip(NAMES, terms, strict=True)))
    if not 0 <= dropout < 1:
        raise GossamerError(f"attend_edges: dropout is {dropout:g}, must be at least 0 and less than 1")
    seed = new_seed(values.device) if dropout else None
    out: Tensor = torch.ops.gossamer.attend_edges.default(positions, coordinates, *terms, seed, scale, slope, dropout)[0]
    return out


SEEDS = -(1 << 31), 1 << 31
"""The range of seeds of dropout; the second number is excluded."""


def new_seed(device: torch.device) -> Tensor:
    """Returns a seed for a call's dropout, [1]."""
    return torch.randint(*SEEDS, (1,), device=device)


def _check(positions: Tensor, coordinates: Tensor, terms: dict[str, Tensor | None]) -> None:
    alone = terms["keys"] is None and any(terms[name] is not None for name in ("weight", "direction"))
    if (terms["queries"] is None) != (terms["keys"] is None) or alone:
        raise GossamerError("attend_edges: give queries and keys together; weight and direction need both")
    sizes: dict[str, Any] = {"i": positions.shape[0] - 1, "p": coordinates.shape[0]}
    first = terms["values"]
    assert first is not None
    if not first.is_floating_point():
        raise GossamerError(f"attend_edges: values are {first.dtype}, must be floats: softmax has no meaning for others")
    widest = max(term.shape[-1] for name, term in terms.items() if term is not None and name in ("values", "keys"))
    if widest > MOST_FEATURES:
        raise GossamerError(
            f"attend_edges: heads have {widest} features, kernels take up to {MOST_FEATURES}: split them into more heads"
        )
    for name, term in terms.items():
        if term is None:
            continue
        letters = _SHAPES[name][: term.dim()] if name == "edge" else _SHAPES[name]
        fits = term.dim() == len(letters) and all(
            agree(sizes.setdefault(each, n), n) for each, n in zip(letters, term.shape, strict=False)
        )
        if not fits or term.dtype != first.dtype:
            expected = ", ".join(f"{each}={sizes[each]}" if each in sizes else each for each in letters)
            raise GossamerError(
                f"attend_edges: {name} is {list(term.shape)} {term.dtype}, must be [{expected}] {first.dtype} "
                "(i rows, j columns, p entries, h heads)"
            )


# Kernels


def _attention(
    positions: Tensor, coordinates: Tensor, terms: Terms, seed: Tensor | None, scale: float, slope: float, dropout: float
) -> Attention:
    values, keys, edge = terms["values"], terms.get("keys"), terms.get("edge")
    return Attention(
        terms=(*(name for name in terms if name != "weight"), *(() if seed is None else ("seed",))),
        heads=values.shape[1],
        features=values.shape[2],
        size=keys.shape[2] if keys is not None else 0,
        shared=edge is not None and edge.dim() == 1,
        weighted="weight" in terms,
        scale=scale,
        slope=slope,
        dropout=dropout,
        format=Format.CSR.with_widths(_width(positions), _width(coordinates)),
        dtype=values.dtype,
    )


def _width(integers: Tensor) -> int:
    return 0 if integers.dtype == torch.int64 else integers.dtype.itemsize * 8


@lru_cache(256)
def _forward_kernel(attention: Attention) -> RegionKernel:
    return compile_region(attention_ir.forward(attention), schedule="attend-edges")


@lru_cache(256)
def _gradient_kernel(attention: Attention, side: str, writes: tuple[str, ...], entry: torch.dtype | None) -> RegionKernel:
    return compile_region(attention_ir.gradient(attention, side, writes, entry), schedule="attend-edges-grad")


def _flat(term: Tensor) -> Tensor:
    """Returns a term as a matrix; a vector becomes a column."""
    return term.contiguous().view(term.shape[0], -1) if term.numel() else term.reshape(term.shape[0], term.shape[1:].numel())


def given_terms(terms: Sequence[Tensor | None]) -> Terms:
    """Returns the terms by name, without those that are left out."""
    return {name: term for name, term in zip(NAMES, terms, strict=True) if term is not None}


def widened(terms: Terms) -> Terms:
    """Returns the terms in the dtype of sums."""
    narrow = terms["values"].dtype not in (torch.float32, torch.float64)
    return {name: term.float() for name, term in terms.items()} if narrow else terms


def attend_on_cpu(positions: Tensor, coordinates: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Computes `gossamer::attend_edges` for CPU tensors."""
    *terms, seed, scale, slope, dropout = rest
    given = widened(given_terms(terms))
    values, rows = given["values"], positions.numel() - 1
    heads, features = values.shape[1:]
    tiled = attend_tiled(positions, coordinates, given, scale) if seed is None and slope == 1 else None
    if tiled is not None:
        return tiled[0].to(terms[0].dtype), tiled[1]
    out, statistics = empty([rows, heads, features], values.dtype), empty([rows, 2, heads], values.dtype)
    if out.numel():
        positions, coordinates = positions.contiguous(), coordinates.contiguous()
        weight = given.get("weight", coordinates).contiguous()  # not read if there is none
        pattern = ByRows(positions, coordinates, weight, rows, values.shape[0])
        attention = _attention(positions, coordinates, given, seed, scale, slope, dropout)
        operands: list[Any] = [pattern, *(_operand(name, given, seed) for name in attention.terms)]
        _forward_kernel(attention).into([_flat(out), _flat(statistics)], operands)
    return out.to(terms[0].dtype), statistics


def backward_on_cpu(
    gradient: Tensor, out: Tensor, statistics: Tensor, positions: Tensor, coordinates: Tensor, *rest: Any
) -> list[Tensor]:
    """Computes `gossamer::attend_edges_backward` for CPU tensors."""
    *terms, seed, scale, slope, dropout, needs = rest
    given = widened(given_terms(terms))
    positions, coordinates = positions.contiguous(), coordinates.contiguous()
    attention = _attention(positions, coordinates, given, seed, scale, slope, dropout)
    wide, rows = statistics.dtype, positions.numel() - 1
    upstream = gradient.to(wide)
    if seed is None and slope == 1:
        tiled = tiled_gradients(upstream, out.to(wide), statistics, positions, coordinates, given, scale)
        if tiled is not None:
            return [tiled[name].to(terms[0].dtype) for name, needed in zip(NAMES, needs, strict=True) if needed]
    shared = {"statistics": statistics, "gradient": upstream, "delta": (upstream * out).sum(-1)}
    reads = {name: _operand(name, given, seed) for name in attention.terms} | {n: _flat(t) for n, t in shared.items()}
    if "weight" in given:
        reads["weight"] = given["weight"]
    wanted = [name for name, needed in zip(NAMES, needs, strict=True) if needed]
    # The kernel writes a share of the direction's gradient for each row.
    shapes = {name: [*([rows] if name == "direction" else []), *given[name].shape] for name in wanted}
    found: Terms = {name: empty(shape, wide) for name, shape in shapes.items()}
    for side, names in GRADIENTS.items():
        writes = tuple(name for name in names if name in wanted)
        if not writes or not gradient.numel() or not coordinates.numel():
            for name in writes:
                found[name].zero_()
            continue
        by = RowForm(positions, coordinates, None)
        if side == "source":
            pattern = (
                attention.format,
                1,
                (statistics.shape[0], given["values"].shape[0]),
                (positions, coordinates, coordinates),
            )
            by = row_form(*pattern) or sorted_by_rows(*pattern)
        _run_side(attention, side, writes, by, reads, found)
    if "direction" in found:
        found["direction"] = found["direction"].sum(0)
    return [found[name].to(terms[0].dtype) for name in wanted]


def _operand(name: str, terms: Terms, seed: Tensor | None) -> Tensor:
    """Returns the operand of the kernels with a name."""
    if name == "seed":
        assert seed is not None
        return seed.to(torch.int32)
    return _flat(terms[name].unsqueeze(0) if name == "direction" else terms[name])


def _run_side(attention: Attention, side: str, writes: tuple[str, ...], by: RowForm, reads: Terms, found: Terms) -> None:
    """Computes the gradients of one side into `found`. `by` is the pattern, or its transpose for the side "source"."""
    weight = reads.get("weight", by.coordinates).contiguous()  # not read if there is none
    entry = by.order if any(name in reads for name in ("edge", "weight", "seed")) else None
    operands: list[Any] = [term for name, term in reads.items() if name != "weight"]
    columns = reads["values" if side == "target" else "statistics"].shape[0]
    pattern: Any = ByRows(by.positions, by.coordinates, weight, by.positions.numel() - 1, columns)
    format = Format.CSR.with_widths(_width(by.positions), _width(by.coordinates))
    kernel = _gradient_kernel(replace(attention, format=format), side, writes, None if entry is None else entry.dtype)
    kernel.into([_flat(found[name]) for name in writes], [pattern, *operands, *([] if entry is None else [entry])])


# Shapes for tracing


def attend_fake(positions: Tensor, coordinates: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Returns empty results of attention, for tracing."""
    values = rest[0]
    rows, (heads, features) = positions.shape[0] - 1, values.shape[1:]
    wide = values.dtype if values.dtype == torch.float64 else torch.float32
    return values.new_empty([rows, heads, features]), values.new_empty([rows, 2, heads], dtype=wide)


def backward_fake(
    gradient: Tensor, out: Tensor, statistics: Tensor, positions: Tensor, coordinates: Tensor, *rest: Any
) -> list[Tensor]:
    """Returns empty gradients, for tracing."""
    *terms, _seed, _scale, _slope, _dropout, needs = rest
    return [term.new_empty(term.shape) for term, needed in zip(terms, needs, strict=True) if needed]
