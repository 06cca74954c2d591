"""Maxima and minima over the edges of a graph, by rows of a CSR pattern, and their gradient.

    gossamer::extremes(positions, coordinates, x, kind) -> Tensor                   "max" or "min" of the rows of each row
    gossamer::extremes_backward(positions, coordinates, grad, x, y, kind) -> Tensor

x is [columns, features], the result [rows, features]; a row without entries gives 0, a NaN stays. As torch's scatter_reduce
into zeros that are not included has it, the gradient is shared evenly among those that are equal, one of which is the 0 that
the result began with.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch_mlir import ir
from torch_mlir.dialects import arith, func

from gossamer.dialects.edges import ReduceEdgesOp
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import ReadOp, end
from gossamer.passes.framework.context import building
from gossamer.runtime.direct_call import describe
from gossamer.runtime.elements import ELEMENTS
from gossamer.runtime.operations import LIBRARY, TAGS, implement
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.arrays.row_form import RowForm, row_form, sorted_by_rows
from gossamer.sparsity.kernels.compile_kernel import compile_region
from gossamer.sparsity.kernels.warm_memory import empty
from gossamer.sparsity.operations.argument_check import check_alike
from gossamer.sparsity.operations.batches import batched_one_by_one
from gossamer.sparsity.operations.derivatives import Derivative
from gossamer.sparsity.operations.matrix_calls import ByRows
from gossamer.sparsity.operations.segments import spread

MOST_FEATURES = 1024
"""Of a node: its results are unrolled in the kernel."""

_OWN, _OTHER = "affine_map<(r, c, f) -> (r, f)>", "affine_map<(r, c, f) -> (c, f)>"


def extremes_ir(what: str, features: int, format: Format, dtype: torch.dtype) -> str:
    """Contract IR for a pattern of any size: "max" and "min" of (a, x), the "ties" of (a, x, y), "shares" of (aᵀ, x, y, share).

    ties    how many entries of each row are equal to its y
    shares  the sums over rows of the transpose of the shares of those y that are equal to x
    """
    matrices = {"max": 1, "min": 1, "ties": 2, "shares": 3}[what]
    with building():
        module = ir.Module.create()
        element, open_ = ir.Type.parse(ELEMENTS[dtype]), ir.ShapedType.get_dynamic_size()
        pattern = ir.RankedTensorType.get([open_, open_], element, ir.Attribute.parse(str(format)))
        matrix = ir.RankedTensorType.get([open_, features], element)
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("region", ([pattern, *[matrix] * matrices], [matrix]))
        with ir.InsertionPoint(function.add_entry_block()):
            a, *given = function.entry_block.arguments
            kind = ir.StringAttr.get(what if matrices == 1 else "add")
            op = ReduceEdgesOp(a, kind, result=matrix)
            with ir.InsertionPoint(ir.Block.create_at_start(op.body, [], [])):
                end(_body(what, given, element))
            func.ReturnOp([op.result])
        module.operation.verify()
        return str(module)


def _body(what: str, given: list[ir.Value], element: ir.Type) -> ir.Value:
    def read(number: int, map_: str) -> ir.Value:
        return ReadOp(given[number], ir.AffineMapAttr(ir.Attribute.parse(map_)), result=element).result

    if len(given) == 1:
        return read(0, _OTHER)
    x, y = (read(0, _OTHER), read(1, _OWN)) if what == "ties" else (read(0, _OWN), read(1, _OTHER))
    equal = arith.cmpf(arith.CmpFPredicate.OEQ, x, y)
    one = arith.select(equal, arith.constant(element, 1.0), arith.constant(element, 0.0))
    return one if what == "ties" else arith.mulf(one, read(2, _OTHER))  # nothing times an infinite share is NaN


@lru_cache(256)
def _kernel(what: str, features: int, format: Format, dtype: torch.dtype) -> RegionKernel:
    return compile_region(extremes_ir(what, features, format, dtype), schedule="reduce-edges")


def _run(what: str, by: RowForm, matrices: list[Tensor]) -> Tensor:
    rows, features = by.positions.numel() - 1, matrices[0].shape[1]
    out = empty([rows, features], matrices[0].dtype)
    letters = ["rf", "cf", "cf"] if what == "shares" else ["cf", "rf"]  # shares go by the transpose of the pattern
    check_alike("extremes", [("rf", out), *zip(letters, matrices, strict=False)])
    if out.numel():
        columns = matrices[-1 if what == "shares" else 0].shape[0]
        pattern: Any = ByRows(by.positions, by.coordinates, by.coordinates, rows, columns)  # it has no values
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


def _fake(positions: Tensor, coordinates: Tensor, x: Tensor, kind: str) -> Tensor:
    return x.new_empty([positions.shape[0] - 1, x.shape[1]])


def _fake_backward(positions: Tensor, coordinates: Tensor, grad: Tensor, x: Tensor, y: Tensor, kind: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    *given, ctx.kind = inputs
    return *given, *outputs


def _gradient(ctx: Any, grad: Tensor) -> Sequence[Tensor | None]:
    positions, coordinates, x, y = ctx.saved_tensors
    if torch.is_grad_enabled():  # this gradient is differentiated in turn, for which there is no kernel
        rows, shares = _shares(positions, coordinates, x, y)
        return None, None, torch.zeros_like(x).index_add(0, coordinates.long(), shares * grad.index_select(0, rows))
    return None, None, torch.ops.gossamer.extremes_backward.default(positions, coordinates, grad, x, y, ctx.kind)


def _tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    (positions, coordinates, x, y), tangent = ctx.saved_tensors, tangents[2]
    if tangent is None:
        return None
    rows, shares = _shares(positions, coordinates, x, y)
    return torch.zeros_like(y).index_add(0, rows, shares * tangent.index_select(0, coordinates))


def _shares(positions: Tensor, coordinates: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each entry, and the derivatives of y [rows, features] with respect to what the entry reads of x."""
    rows = spread(positions, torch.arange(y.shape[0], device=y.device), coordinates.shape[0])
    equal = (x.detach().index_select(0, coordinates) == y.detach().index_select(0, rows)).to(x.dtype)
    ties = (y.detach() == 0).to(x.dtype).index_add(0, rows, equal)
    return rows, equal / ties.index_select(0, rows)


_PATTERN = "Tensor positions, Tensor coordinates"
for _name, _arguments, _cpu, _meta in (
    ("extremes", f"{_PATTERN}, Tensor x, str kind", _extremes, _fake),
    ("extremes_backward", f"{_PATTERN}, Tensor grad, Tensor x, Tensor y, str kind", _backward, _fake_backward),
):
    LIBRARY.define(f"{_name}({_arguments}) -> Tensor", tags=TAGS)
    implement(_name, _cpu)
    describe(_name, _meta)
    batched_one_by_one(_name)
Derivative(_setup, _gradient, _tangent)("extremes")

extremes = torch.ops.gossamer.extremes.default
extremes_backward = torch.ops.gossamer.extremes_backward.default
