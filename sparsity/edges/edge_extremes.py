"""Computes maxima and minima over the edges of a graph, by rows of a CSR pattern, and their gradients.

    gossamer::extremes(positions, coordinates, x, kind) -> Tensor                   "max" or "min" of x over each row's entries
    gossamer::extremes_backward(positions, coordinates, grad, x, y, kind) -> Tensor

x is [columns, features], the result [rows, features]. A row without entries gives 0, and a NaN stays. Gradients are those of
torch's scatter_reduce into zeros with include_self=False: equal extremes share the gradient evenly, and so does the initial 0
if the result is 0.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch_mlir import ir
from torch_mlir.dialects import arith

from gossamer.dialects.edges import ReduceEdgesOp
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import ReadOp, end
from gossamer.passes.framework.context import building
from gossamer.runtime.elements import ELEMENTS
from gossamer.runtime.memory.warm_memory import empty
from gossamer.runtime.operations import Operation
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.arrays.row_form import RowForm, row_form, sorted_by_rows
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.compiler.op_ir import function_of
from gossamer.sparsity.operations.batches import batched_one_by_one
from gossamer.sparsity.operations.derivatives import Derivative
from gossamer.sparsity.operations.matrix_calls import ByRows
from gossamer.sparsity.operations.segments import spread

MOST_FEATURES = 1024
"""The most features of a node, because the kernel unrolls its results."""

_OWN, _OTHER = "affine_map<(r, c, f) -> (r, f)>", "affine_map<(r, c, f) -> (c, f)>"


def extremes_ir(what: str, features: int, format: Format, dtype: torch.dtype) -> str:
    """Returns contract IR for any pattern: "max" or "min" of (a, x), "ties" of (a, x, y), "shares" of (aᵀ, x, y, share).

    ties    the number of entries of each row that are equal to its y
    shares  the sums, over the rows of the transpose, of the shares of all y that are equal to x
    """
    matrices = {"max": 1, "min": 1, "ties": 2, "shares": 3}[what]
    with building():
        element, open_ = ir.Type.parse(ELEMENTS[dtype]), ir.ShapedType.get_dynamic_size()
        pattern = ir.RankedTensorType.get([open_, open_], element, ir.Attribute.parse(str(format)))
        matrix = ir.RankedTensorType.get([open_, features], element)

        def build(a: ir.Value, *given: ir.Value) -> list[ir.Value]:
            op = ReduceEdgesOp(a, ir.StringAttr.get(what if matrices == 1 else "add"), result=matrix)
            with ir.InsertionPoint(ir.Block.create_at_start(op.body, [], [])):
                end(_body(what, list(given), element))
            return [op.result]

        return function_of([pattern, *[matrix] * matrices], build)


def _body(what: str, given: list[ir.Value], element: ir.Type) -> ir.Value:
    def read(number: int, map_: str) -> ir.Value:
        return ReadOp(given[number], ir.AffineMapAttr(ir.Attribute.parse(map_)), result=element).result

    if len(given) == 1:
        return read(0, _OTHER)
    x, y = (read(0, _OTHER), read(1, _OWN)) if what == "ties" else (read(0, _OWN), read(1, _OTHER))
    equal = arith.cmpf(arith.CmpFPredicate.OEQ, x, y)
    one = arith.select(equal, arith.constant(element, 1.0), arith.constant(element, 0.0))
    return one if what == "ties" else arith.mulf(one, read(2, _OTHER))  # 0 times an infinite share is NaN


@lru_cache(256)
def _kernel(what: str, features: int, format: Format, dtype: torch.dtype) -> RegionKernel:
    return compile_region(extremes_ir(what, features, format, dtype), schedule="reduce-edges")


def _run(what: str, by: RowForm, matrices: list[Tensor]) -> Tensor:
    rows, features = by.positions.numel() - 1, matrices[0].shape[1]
    out = empty([rows, features], matrices[0].dtype)
    if out.numel():
        columns = matrices[-1 if what == "shares" else 0].shape[0]
        pattern: Any = ByRows(by.positions, by.coordinates, by.coordinates, rows, columns)  # the pattern has no values
        kernel = _kernel(what, features, by.format, out.dtype)
        kernel.into([out], [pattern, *(matrix.contiguous() for matrix in matrices)])
    return out


def _extremes(positions: Tensor, coordinates: Tensor, x: Tensor, kind: str) -> Tensor:
    return _run(kind, RowForm(positions.contiguous(), coordinates.contiguous(), None), [x])


def _backward(positions: Tensor, coordinates: Tensor, grad: Tensor, x: Tensor, y: Tensor, kind: str) -> Tensor:
    by = RowForm(positions.contiguous(), coordinates.contiguous(), None)
    ties = _run("ties", by, [x, y]).add_(y == 0)
    pattern = by.format, 1, (y.shape[0], x.shape[0]), (by.positions, by.coordinates, by.coordinates)
    return _run("shares", row_form(*pattern) or sorted_by_rows(*pattern), [x, y, grad / ties])


def _gradient(ctx: Any, grad: Tensor) -> Sequence[Tensor | None]:
    positions, coordinates, x, y = ctx.saved_tensors
    if torch.is_grad_enabled():  # there is no kernel for gradients of this gradient
        rows, shares = _shares(positions, coordinates, x, y)
        return None, None, torch.zeros_like(x).index_add(0, coordinates.long(), shares * grad.index_select(0, rows))
    return None, None, extremes_backward(positions, coordinates, grad, x, y, ctx.kind)


def _tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    (positions, coordinates, x, y), tangent = ctx.saved_tensors, tangents[2]
    if tangent is None:
        return None
    rows, shares = _shares(positions, coordinates, x, y)
    return torch.zeros_like(y).index_add(0, rows, shares * tangent.index_select(0, coordinates))


def _rows(positions: Tensor, coordinates: Tensor) -> Tensor:
    """Returns the row of each entry, [entries]."""
    return spread(positions, torch.arange(positions.shape[0] - 1, device=positions.device), coordinates.shape[0])


def _shares(positions: Tensor, coordinates: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the row of each entry, and the derivatives of y [rows, features] with respect to the entry's row of x."""
    rows = _rows(positions, coordinates)
    equal = (x.detach().index_select(0, coordinates) == y.detach().index_select(0, rows)).to(x.dtype)
    ties = (y.detach() == 0).to(x.dtype).index_add(0, rows, equal)
    return rows, equal / ties.index_select(0, rows)


def _extremes_of_entries(positions: Tensor, coordinates: Tensor, x: Tensor, kind: str) -> Tensor:
    """Computes extremes by torch's operations on the messages of entries, on any device."""
    out = x.new_zeros(positions.numel() - 1, x.shape[1])
    rows = _rows(positions, coordinates)[:, None].expand(-1, x.shape[1])
    return out.scatter_reduce_(0, rows, x.index_select(0, coordinates), f"a{kind}", include_self=False)


def _backward_of_entries(positions: Tensor, coordinates: Tensor, grad: Tensor, x: Tensor, y: Tensor, kind: str) -> Tensor:
    rows = _rows(positions, coordinates)
    equal = x.index_select(0, coordinates) == y.index_select(0, rows)
    ties = (y == 0).to(y.dtype).index_add_(0, rows, equal.to(y.dtype))
    shares = torch.where(equal, (grad / ties).index_select(0, rows), 0)
    return torch.zeros_like(x).index_add_(0, coordinates, shares)


_PATTERN = "Tensor positions: i[rows+1], Tensor coordinates: i[entries]"
_NODES = "Tensor x: T[columns features]"
extremes = Operation(
    f"extremes({_PATTERN}, {_NODES}, str kind) -> Tensor: T[rows features]",
    _extremes,
    _extremes_of_entries,
    derivative=Derivative("positions coordinates x result", _gradient, _tangent),
    batched=batched_one_by_one,
).register()
extremes_backward = Operation(
    f"extremes_backward({_PATTERN}, Tensor grad: T[rows features], {_NODES}, Tensor y: T[rows features], str kind)"
    " -> Tensor: T[columns features]",
    _backward,
    _backward_of_entries,
    batched=batched_one_by_one,
).register()
