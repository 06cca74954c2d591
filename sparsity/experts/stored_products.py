"""Multiplies rows, sorted by expert, with weights of experts that store only their nonzeros.

gossamer::stored_product(x, ends, ..., values, rows, columns, turned) -> Tensor    y[t] = weight[e] x[t], or weight[e].T x[t]
gossamer::stored_sample(left, right, ends, positions, coordinates) -> Tensor       the gradient of the values

The weights of all experts are one matrix in CSR, [experts * rows, columns], in which each expert has some rows. The rows of x
from ends[e - 1] to ends[e] belong to expert e, and rows after the last end give 0. The gradients of both operations are such
products again, so they can be differentiated any number of times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.dialects.format import Format
from gossamer.runtime.experts.routes import hit
from gossamer.runtime.operations import Operation
from gossamer.runtime.remembered import Remembered
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Bound, dense
from gossamer.sparsity.operations.batches import batched_one_by_one
from gossamer.sparsity.operations.dense_results import densified, einsum, sample, total
from gossamer.sparsity.operations.derivatives import Derivative

LINES = Format.parse("#sparse_tensor.encoding<{ map = (e, m, k) -> (e : dense, m : dense, k : compressed) }>")
"""The format for the weights of all experts in one tensor: a matrix in CSR for each."""

_FORMATS = {(a, b): Format.CSR.with_widths(8 * a, 8 * b) for a in (4, 8) for b in (4, 8)}


@dataclass(frozen=True, eq=False)
class _Pattern:
    """Where the nonzeros of each expert are.

    positions  the positions of each expert, from 0 on
    begins     where its coordinates and values begin in the common arrays, and where the last ones end
    """

    positions: list[Tensor]
    begins: list[int]

    @classmethod
    def of(cls, positions: Tensor, experts: int) -> "_Pattern":
        """Returns the pattern of a number of experts. It is kept as long as the positions live."""
        return _known.get([positions], (experts,), lambda: cls._made(positions, experts))

    @classmethod
    def _made(cls, positions: Tensor, experts: int) -> "_Pattern":
        rows = (positions.numel() - 1) // experts
        begins = [int(positions[expert * rows]) for expert in range(experts + 1)]
        each = [positions[e * rows : (e + 1) * rows + 1] - begins[e] for e in range(experts)]
        return cls(each, begins)

    def matrix(self, expert: int, coordinates: Tensor, values: Tensor, columns: int) -> Bound:
        """Returns the weight of an expert as an operand with the letters "mk"."""
        positions, own = self.positions[expert], slice(self.begins[expert], self.begins[expert + 1])
        format = _FORMATS[positions.itemsize, coordinates.itemsize]
        shape = positions.numel() - 1, columns
        return Bound(Operand("mk", format), (positions, coordinates[own], values[own]), shape)


_known: Remembered[_Pattern] = Remembered(most=256)


def _check(ends: Tensor, positions: Tensor, coordinates: Tensor) -> None:
    experts, integers = ends.numel(), (torch.int32, torch.int64)
    if positions.dtype not in integers or coordinates.dtype not in integers:
        raise ArgumentError(
            f"experts: positions are {positions.dtype}, coordinates {coordinates.dtype}; must be int32 or int64"
        )
    if not experts or (positions.numel() - 1) % experts:
        raise ArgumentError(
            f"experts: {positions.numel() - 1} rows of weights must be equally many for each of {experts} experts"
        )


# Computation


def _product(
    x: Tensor, ends: Tensor, positions: Tensor, coordinates: Tensor, values: Tensor, rows: int, columns: int, turned: bool
) -> Tensor:
    _check(ends, positions, coordinates)
    given, made = (rows, columns) if turned else (columns, rows)
    stored = positions.numel() - 1
    if x.shape[1] != given:
        raise ArgumentError(f"experts: tokens have {x.shape[1]} elements, must have {given} for weights [{rows}, {columns}]")
    if stored != rows * ends.numel():
        raise ArgumentError(f"experts: {stored} rows are stored, must be {rows * ends.numel()}, {rows} for each expert")
    out, pattern, last = x.new_empty(x.shape[0], made), _Pattern.of(positions, ends.numel()), 0
    for expert, begin, end in hit(ends, x.shape[0]):
        weight = pattern.matrix(expert, coordinates, values, columns)
        own = dense("tm" if turned else "tk", x[begin:end])
        out[begin:end] = einsum([weight, own], "tk" if turned else "tm")
        last = end
    out[last:] = 0
    return out


def _fake_product(
    x: Tensor, ends: Tensor, positions: Tensor, coordinates: Tensor, values: Tensor, rows: int, columns: int, turned: bool
) -> Tensor:
    return x.new_empty(x.shape[0], columns if turned else rows)


def _sample(left: Tensor, right: Tensor, ends: Tensor, positions: Tensor, coordinates: Tensor) -> Tensor:
    _check(ends, positions, coordinates)
    out, pattern = left.new_zeros(coordinates.numel()), _Pattern.of(positions, ends.numel())
    for expert, begin, end in hit(ends, left.shape[0]):
        weight = pattern.matrix(expert, coordinates, out, right.shape[1])
        own = slice(pattern.begins[expert], pattern.begins[expert + 1])
        out[own] = sample(weight, [dense("tm", left[begin:end]), dense("tk", right[begin:end])])
    return out


def _fake_sample(left: Tensor, right: Tensor, ends: Tensor, positions: Tensor, coordinates: Tensor) -> Tensor:
    return left.new_empty(coordinates.numel())


# Derivatives


def _gradients(ctx: Any, gradient: Tensor) -> Sequence[Tensor | None]:
    x, ends, positions, coordinates, values = ctx.saved_tensors
    needed = ctx.needs_input_grad[2:]
    sizes = ctx.rows, ctx.columns
    sides = (x, gradient) if ctx.turned else (gradient, x)
    return (
        stored_product(gradient, ends, positions, coordinates, values, *sizes, not ctx.turned) if needed[0] else None,
        *(None, None, None),
        stored_sample(*sides, ends, positions, coordinates) if needed[4] else None,
    )


def _tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    x, ends, positions, coordinates, values = ctx.saved_tensors
    of_x, *_, of_values = tangents
    pairs = [(a, b) for a, b in ((of_x, values), (x, of_values)) if a is not None and b is not None]
    return total(stored_product(a, ends, positions, coordinates, b, ctx.rows, ctx.columns, ctx.turned) for a, b in pairs)


def _sample_gradients(ctx: Any, gradient: Tensor) -> Sequence[Tensor | None]:
    left, right, ends, positions, coordinates = ctx.saved_tensors
    needed, sizes = ctx.needs_input_grad[2:], (left.shape[1], right.shape[1])
    return (
        stored_product(right, ends, positions, coordinates, gradient, *sizes, False) if needed[0] else None,
        stored_product(left, ends, positions, coordinates, gradient, *sizes, True) if needed[1] else None,
        *(None, None, None),
    )


def _sample_tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    left, right, ends, positions, coordinates = ctx.saved_tensors
    of_left, of_right, *_ = tangents
    pairs = [(a, b) for a, b in ((of_left, right), (left, of_right)) if a is not None and b is not None]
    return total(stored_sample(a, b, ends, positions, coordinates) for a, b in pairs)


_PATTERN = "Tensor ends: i[experts], Tensor positions: i[lines+1], Tensor coordinates: i[entries]"
stored_product = Operation(
    f"stored_product(Tensor x: F[slots any], {_PATTERN}, Tensor values: F[entries], SymInt rows, SymInt columns, bool turned)"
    " -> Tensor",
    _product,
    _product,
    _fake_product,
    Derivative("x ends positions coordinates values", _gradients, _tangent),
    batched_one_by_one,
).register()
stored_sample = Operation(
    f"stored_sample(Tensor left: F[slots rows], Tensor right: F[slots columns], {_PATTERN}) -> Tensor",
    _sample,
    _sample,
    _fake_sample,
    Derivative("left right ends positions coordinates", _sample_gradients, _sample_tangent),
    batched_one_by_one,
).register()


# Operations in graphs, before these become regions


def _expert(
    positions: Tensor, coordinates: Tensor, values: Tensor, expert: int, experts: int, columns: int, turned: bool
) -> Tensor:
    weight = densified(_Pattern.of(positions, experts).matrix(expert, coordinates, values, columns)).values
    return weight.t() if turned else weight


def _fake_expert(
    positions: Tensor, coordinates: Tensor, values: Tensor, expert: int, experts: int, columns: int, turned: bool
) -> Tensor:
    weight = values.new_empty((positions.shape[0] - 1) // experts, columns)
    return weight.t() if turned else weight


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], weight.shape[2])
    for expert, begin, end in hit(ends, x.shape[0]):
        out[begin:end] = x[begin:end] @ weight[expert]
    return out


def _fake_grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


stored_expert = Operation(
    "stored_expert(Tensor positions: i[lines+1], Tensor coordinates: i[entries], Tensor values: f[entries], int expert,"
    " int experts, int columns, bool turned) -> Tensor",
    _expert,
    _expert,
    _fake_expert,
).register()
"""Returns the dense weight of one expert, [rows, columns], or its transpose."""
grouped_rows = Operation(
    "grouped_rows(Tensor x: F[slots columns], Tensor weight: F[experts columns rows], Tensor ends: i[experts]) -> Tensor",
    _grouped,
    _grouped,
    _fake_grouped,
).register()
"""Returns the product of sorted rows with dense weights. Graphs have it while passes look for experts."""
