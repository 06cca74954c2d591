"""What the operations on sparse tensors run on CUDA devices.

    einsum, sample                      kernels "rows" and "dots" for products of one matrix, which is taken by rows (row_form)
    segment_reduce, softmax             kernels "segments"
    attend_edges                        composed of these (composed_attention)
    extremes, tall_product              torch's operations on messages of entries, and on dense matrices
    other products, what is no float    torch's operations on entries (entry_products), or on segments
    formats, coordinates, places        the CPU's implementation, for it is made of torch's operations

Nothing goes through the CPU, but the sizes that results have are waited for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.runtime.operations import KERNELS, LIBRARY
from gossamer.sparsity.arrays.row_form import RowForm
from gossamer.sparsity.arrays.stored_entries import as_int64
from gossamer.sparsity.edges import composed_attention
from gossamer.sparsity.kernels import segment_ir
from gossamer.sparsity.kernels.gpu_kernels import LoadedKernel, loaded_kernel
from gossamer.sparsity.operations import entry_products
from gossamer.sparsity.operations.calls import Call, call_of
from gossamer.sparsity.operations.dense_results import einsum_ir, sample_ir
from gossamer.sparsity.operations.entry_products import widened
from gossamer.sparsity.operations.matrix_calls import RowProduct, RowSample
from gossamer.sparsity.operations.segments import segment_reduce, spread, with_missing

_OF_TORCH = ("convert", "compress", "pick", "coordinates", "places", "set_places", "well_formed", "fibres")
"""Operations that the CPU computes by torch's own, as any device can."""


# Products


def einsum(arrays: list[Tensor], sizes: list[int], text: str) -> Tensor:
    """gossamer::einsum for CUDA tensors."""
    out = _by_rows(call_of(einsum_ir, RowProduct.of, text, arrays, sizes), "rows", arrays, sizes)
    return entry_products.einsum(arrays, sizes, text) if out is None else out


def sample(arrays: list[Tensor], sizes: list[int], text: str) -> Tensor:
    """gossamer::sample for CUDA tensors."""
    out = _by_rows(call_of(sample_ir, RowSample.of, text, arrays, sizes), "dots", arrays, sizes)
    return entry_products.sample(arrays, sizes, text) if out is None else out


def _by_rows(call: Call, schedule: str, arrays: Sequence[Tensor], sizes: Sequence[int]) -> Tensor | None:
    """The result of a product with one matrix, by our kernel; None if it is none such, or there is no kernel for it."""
    product, place = call.product, arrays[-1].device

    def kernel(form: RowForm) -> LoadedKernel:
        assert product is not None
        found = loaded_kernel(call.build, (product.canonical(form.format), call.dtype), schedule, place)
        if found is None:
            raise _NoKernel
        return found

    try:
        return None if product is None else product.run(kernel, arrays, sizes)
    except _NoKernel:
        return None


class _NoKernel(Exception):
    """There is none for a product."""


# Segments


def reduce(positions: Tensor, values: Tensor, kind: str, extent: int) -> Tensor:
    """gossamer::segment_reduce for CUDA tensors."""
    if positions.numel() == 2 and values.numel():  # one segment would be one warp's work
        whole = getattr(torch, kind)(values, **({} if kind in ("amax", "amin") else {"dtype": values.dtype}))
        return with_missing(positions, whole.view(1), kind, extent)
    out = values.new_empty(positions.numel() - 1)
    if not _on_segments(segment_ir.reduce, positions, [values], kind, out):
        segment = spread(positions, torch.arange(out.numel(), device=out.device), values.numel())
        out.fill_(_neutral(kind, values.dtype)).scatter_reduce_(0, segment, values, kind)
    return with_missing(positions, out, kind, extent)


def _neutral(kind: str, dtype: torch.dtype) -> float:
    """What a segment without entries gives."""
    if kind in ("sum", "prod"):
        return 0 if kind == "sum" else 1
    if dtype.is_floating_point:
        return -torch.inf if kind == "amax" else torch.inf
    return torch.iinfo(dtype).min if kind == "amax" else torch.iinfo(dtype).max


def softmax(positions: Tensor, values: Tensor, log: bool) -> Tensor:
    """gossamer::softmax for CUDA tensors."""
    out = torch.empty_like(values, memory_format=torch.contiguous_format)
    if _on_segments(segment_ir.softmax, positions, [values], log, out):
        return out
    wide, count = widened(values), values.numel()
    shifted = wide - spread(positions, segment_reduce(positions, wide, "amax"), count)
    totals = segment_reduce(positions, shifted.exp(), "sum")
    result = shifted - spread(positions, totals.log(), count) if log else shifted.exp() / spread(positions, totals, count)
    return result.to(values.dtype)


def softmax_backward(positions: Tensor, grad: Tensor, output: Tensor, log: bool) -> Tensor:
    """gossamer::softmax_backward for CUDA tensors."""
    out = torch.empty_like(output, memory_format=torch.contiguous_format)
    if _on_segments(segment_ir.softmax_backward, positions, [grad, output], log, out):
        return out
    wide, y, count = widened(grad), widened(output), output.numel()
    total = spread(positions, segment_reduce(positions, wide if log else wide * y, "sum"), count)
    return (wide - y.exp() * total if log else y * (wide - total)).to(output.dtype)


def _on_segments(build: Callable[..., str], positions: Tensor, operands: list[Tensor], option: str | bool, out: Tensor) -> bool:
    """Compute by our kernel, if there is one."""
    if not out.numel():
        return True
    positions = positions if positions.dtype in (torch.int32, torch.int64) else as_int64(positions)
    kernel = loaded_kernel(build, (positions.dtype, out.dtype, option), "segments", out.device)
    if kernel is not None:
        kernel([positions.contiguous(), *(operand.contiguous() for operand in operands)], out)
    return kernel is not None


# Extremes over edges


def extremes(positions: Tensor, coordinates: Tensor, x: Tensor, kind: str) -> Tensor:
    """gossamer::extremes for CUDA tensors."""
    out = x.new_zeros(positions.numel() - 1, x.shape[1])
    rows = _rows(positions, coordinates)[:, None].expand(-1, x.shape[1])
    return out.scatter_reduce_(0, rows, x.index_select(0, coordinates), f"a{kind}", include_self=False)


def extremes_backward(positions: Tensor, coordinates: Tensor, grad: Tensor, x: Tensor, y: Tensor, kind: str) -> Tensor:
    """gossamer::extremes_backward for CUDA tensors."""
    rows = _rows(positions, coordinates)
    equal = x.index_select(0, coordinates) == y.index_select(0, rows)
    ties = (y == 0).to(y.dtype).index_add_(0, rows, equal.to(y.dtype))
    shares = torch.where(equal, (grad / ties).index_select(0, rows), 0)
    return torch.zeros_like(x).index_add_(0, coordinates, shares)


def _rows(positions: Tensor, coordinates: Tensor) -> Tensor:
    """[entries]: the row of each."""
    return spread(positions, torch.arange(positions.numel() - 1, device=positions.device), coordinates.numel())


_OWN: dict[str, Callable[..., Any]] = {
    "einsum": einsum,
    "sample": sample,
    "einsum_sparse": entry_products.einsum_sparse,
    "add_sparse": entry_products.add_sparse,
    "segment_reduce": reduce,
    "softmax": softmax,
    "softmax_backward": softmax_backward,
    "attend_edges": composed_attention.attend_edges,
    "attend_edges_backward": composed_attention.attend_edges_backward,
    "extremes": extremes,
    "extremes_backward": extremes_backward,
    "tall_product": torch.mm,
}


def implementations() -> dict[str, Callable[..., Any]]:
    """What CUDA tensors run, by the name of the operation; all of them are there once `gossamer.sparsity` is imported."""
    return {**_OWN, **{name: KERNELS[name] for name in _OF_TORCH}}


def register() -> None:
    """Has torch's dispatcher take them for CUDA tensors."""
    for name, implementation in implementations().items():
        LIBRARY.impl(name, implementation, "CUDA")
