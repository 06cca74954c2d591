"""Operations on segments of entries, such as the rows of a CSR matrix: reductions, softmax and its gradient.

    gossamer::segment_reduce(positions, values, kind, extent) -> Tensor   "sum", "prod", "amax" or "amin" of each segment
    gossamer::softmax(positions, values, log) -> Tensor                   softmax, or its logarithm, within each segment
    gossamer::softmax_backward(positions, grad, output, log) -> Tensor    its derivative

positions   [segments + 1], of any integer type: segment s has the entries from positions[s] to positions[s + 1]
values      [entries]

`lower-segments` makes their kernels. They are parallel over shares of equal work, and a segment stays in registers or cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.runtime.operations import Operation
from gossamer.sparsity.arrays.stored_entries import as_int64
from gossamer.sparsity.compiler import segment_ir
from gossamer.sparsity.compiler.op_kernels import kernel_on, on_gpu
from gossamer.sparsity.operations.batches import batched_one_by_one
from gossamer.sparsity.operations.derivatives import Derivative


def segment_reduce(positions: Tensor, values: Tensor, kind: str, extent: int = 0) -> Tensor:
    """Returns the "sum", "prod", "amax" or "amin" of each segment, [segments].

    A segment stands for `extent` elements; those without entry are 0. With extent = 0 only entries count, and a segment without
    entries gives 0, 1, the lowest or the highest number.
    """
    out: Tensor = _reduce_segments(positions, values, kind, extent)
    return out


def segment_softmax(positions: Tensor, values: Tensor, log: bool = False) -> Tensor:
    """Returns the softmax of each segment, or its logarithm, [entries]."""
    out: Tensor = _softmax_segments(positions, values, log)
    return out


def softmax_backward(positions: Tensor, grad: Tensor, output: Tensor, log: bool = False) -> Tensor:
    """Returns the gradient of the values of `segment_softmax` [entries], from the gradient `grad` of its result `output`."""
    out: Tensor = _softmax_gradients(positions, grad, output, log)
    return out


def spread(positions: Tensor, values: Tensor, entries: int) -> Tensor:
    """Returns the value of its segment for each entry [entries], from values [segments]."""
    return values.repeat_interleave(as_int64(positions).diff(), output_size=entries)


def widened(values: Tensor) -> Tensor:
    """Returns values in the dtype of sums: int64 for bools and uint8, f32 for 16-bit floats."""
    if values.dtype in (torch.bool, torch.uint8):
        return values.long()
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


# Kernels


def _ran(build: Callable[..., str], positions: Tensor, operands: list[Tensor], option: str | bool, out: Tensor) -> bool:
    """Computes by our kernel for the device. Returns False if a GPU has none."""
    if not out.numel():
        return True
    if on_gpu(out.device) and positions.dtype not in (torch.int32, torch.int64):
        positions = as_int64(positions)
    kernel = kernel_on(out.device, build, (positions.dtype, out.dtype, option), "segments")
    if kernel is not None:
        kernel([positions.contiguous(), *(operand.contiguous() for operand in operands)], out)
    return kernel is not None


def _reduce(positions: Tensor, values: Tensor, kind: str, extent: int) -> Tensor:
    if on_gpu(values.device) and positions.numel() == 2 and values.numel():  # one segment would be one warp's work
        whole = getattr(torch, kind)(values, **({} if kind in ("amax", "amin") else {"dtype": values.dtype}))
        return _with_missing(positions, values, whole.view(1), kind, extent)
    out = values.new_empty(positions.numel() - 1)
    if not _ran(segment_ir.reduce, positions, [values], kind, out):
        segment = spread(positions, torch.arange(out.numel(), device=out.device), values.numel())
        out.fill_(_neutral(kind, values.dtype)).scatter_reduce_(0, segment, values, kind)
    return _with_missing(positions, values, out, kind, extent)


def _with_missing(positions: Tensor, values: Tensor, reduced: Tensor, kind: str, extent: int) -> Tensor:
    """Returns reduced entries after counting the zeros of elements without entry, too (see `segment_reduce`)."""
    if kind == "sum" or not extent:
        return reduced
    if kind != "prod":
        with_zero = reduced.clamp(min=0) if kind == "amax" else reduced.clamp(max=0)
    elif bool(reduced.isfinite().all()):
        with_zero = reduced * 0
    else:  # a product of finite entries may be infinite; 0 times an entry is NaN only if the entry is not finite
        with_zero = _reduce(positions, values * 0, "sum", 0)
    return torch.where(as_int64(positions).diff() < extent, with_zero, reduced)


def _neutral(kind: str, dtype: torch.dtype) -> float:
    """Returns the result of a segment without entries."""
    if kind in ("sum", "prod"):
        return 0 if kind == "sum" else 1
    if dtype.is_floating_point:
        return -torch.inf if kind == "amax" else torch.inf
    return torch.iinfo(dtype).min if kind == "amax" else torch.iinfo(dtype).max


def _softmax(positions: Tensor, values: Tensor, log: bool) -> Tensor:
    out = torch.empty_like(values, memory_format=torch.contiguous_format)
    if _ran(segment_ir.softmax, positions, [values], log, out):
        return out
    wide, count = widened(values), values.numel()
    shifted = wide - spread(positions, segment_reduce(positions, wide, "amax"), count)
    totals = segment_reduce(positions, shifted.exp(), "sum")
    result = shifted - spread(positions, totals.log(), count) if log else shifted.exp() / spread(positions, totals, count)
    return result.to(values.dtype)


def _softmax_backward(positions: Tensor, grad: Tensor, output: Tensor, log: bool) -> Tensor:
    out = torch.empty_like(output, memory_format=torch.contiguous_format)
    if _ran(segment_ir.softmax_backward, positions, [grad, output], log, out):
        return out
    wide, y, count = widened(grad), widened(output), output.numel()
    total = spread(positions, segment_reduce(positions, wide if log else wide * y, "sum"), count)
    return (wide - y.exp() * total if log else y * (wide - total)).to(output.dtype)


# Derivatives


def _total(positions: Tensor, values: Tensor) -> Tensor:
    """Returns the sum of the values of its segment for each entry, [entries]."""
    return spread(positions, segment_reduce(positions, values, "sum"), values.shape[0])


def _reduce_backward(ctx: Any, grad: Tensor) -> Sequence[Tensor | None]:
    positions, values, _ = ctx.saved_tensors
    own = spread(positions, grad, values.shape[0])
    return None, own if ctx.kind == "sum" else _slopes(ctx) * own


def _reduce_tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    positions, tangent = ctx.saved_tensors[0], tangents[1]
    if tangent is None:
        return None
    return segment_reduce(positions, tangent if ctx.kind == "sum" else _slopes(ctx) * tangent, "sum")


def _slopes(ctx: Any) -> Tensor:
    """Returns the derivative of its segment's product, maximum or minimum for each entry, [entries]."""
    positions, values, out = ctx.saved_tensors
    entries = values.shape[0]
    missing = ctx.extent - as_int64(positions).diff() if ctx.extent else torch.zeros_like(out, dtype=torch.int64)
    if ctx.kind == "prod":
        return torch.where(spread(positions, missing, entries) > 0, 0, _of_product(positions, values, ctx.extent or entries))
    # As in torch, equal elements share the gradient evenly, including zeros without entry.
    ties = (values == spread(positions, out, entries)).to(values.dtype)
    count = segment_reduce(positions, ties, "sum") + torch.where(out == 0, missing, 0)
    return ties / spread(positions, count, entries)


def _of_product(positions: Tensor, values: Tensor, longest: int) -> Tensor:
    """Returns, for each entry, the product of the others in its segment. Segments have at most `longest` entries."""
    entries = values.shape[0]
    before = torch.arange(entries, device=values.device) - spread(positions, as_int64(positions)[:-1], entries)
    after = spread(positions, as_int64(positions).diff(), entries) - before - 1
    return _of_neighbours(values, before, 1, longest) * _of_neighbours(values, after, -1, longest)


def _of_neighbours(values: Tensor, there: Tensor, towards: int, longest: int) -> Tensor:
    """Returns, for each entry, the product of the `there` entries before it (`towards` = 1) or after it (-1) in its segment.

    A scan of log(longest) steps needs no division (a factor may be 0 or infinite), and can itself be differentiated.
    """
    own = torch.arange(values.shape[0], device=values.device)

    def neighbours(of: Tensor, reach: int, least: int) -> Tensor:
        """Not by `roll`, because it asks whether there are any entries, which a graph may not know."""
        exists = there > least
        return torch.where(exists, of.gather(0, torch.where(exists, own - towards * reach, own)), 1)

    product, reach = neighbours(values, 1, 0), 1
    while reach < longest:
        product = product * neighbours(product, reach, reach)
        reach *= 2
    return product


def _softmax_gradient(ctx: Any, grad: Tensor) -> Sequence[Tensor | None]:
    positions, output = ctx.saved_tensors
    return None, softmax_backward(positions, grad, output, ctx.log)


def _softmax_tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    (positions, output), tangent = ctx.saved_tensors, tangents[1]
    if tangent is None:
        return None
    if ctx.log:
        return tangent - _total(positions, output.exp() * tangent)
    return softmax_backward(positions, tangent, output)  # the Jacobian is symmetric


def _second_gradient(ctx: Any, more: Tensor) -> Sequence[Tensor | None]:
    """Returns the derivatives of y * (grad - sum(grad * y)), or of grad - exp(y) * sum(grad), with respect to grad and y."""
    positions, grad, y = ctx.saved_tensors
    if ctx.log:
        weighted = y.exp() * more
        return None, more - _total(positions, weighted), -weighted * _total(positions, grad)
    weighted = y * more
    summed = _total(positions, weighted)
    return None, weighted - y * summed, more * (grad - _total(positions, grad * y)) - grad * summed


def _backward_tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    """Returns the tangent of the functions in `_second_gradient`."""
    positions, grad, y = ctx.saved_tensors
    _, of_grad, of_y = tangents
    found = None if of_grad is None else softmax_backward(positions, of_grad, y, ctx.log)
    if of_y is None:
        return found
    if ctx.log:
        more = -y.exp() * of_y * _total(positions, grad)
    else:
        more = of_y * (grad - _total(positions, grad * y)) - y * _total(positions, grad * of_y)
    return more if found is None else found + more


# The operations

_GIVEN = "Tensor positions: i[segments+1], Tensor values: T[entries]"
_reduce_segments = Operation(
    f"segment_reduce({_GIVEN}, str kind, SymInt extent) -> Tensor: T[segments]",
    _reduce,
    _reduce,
    derivative=Derivative("positions values result", _reduce_backward, _reduce_tangent),
    batched=batched_one_by_one,
).register()
_softmax_segments = Operation(
    f"softmax({_GIVEN}, bool log) -> Tensor: T[entries]",
    _softmax,
    _softmax,
    derivative=Derivative("positions result", _softmax_gradient, _softmax_tangent),
    batched=batched_one_by_one,
).register()
_softmax_gradients = Operation(
    "softmax_backward(Tensor positions: i[segments+1], Tensor grad: T[entries], Tensor output: T[entries], bool log)"
    " -> Tensor: T[entries]",
    _softmax_backward,
    _softmax_backward,
    derivative=Derivative("positions grad output", _second_gradient, _backward_tangent),
    batched=batched_one_by_one,
).register()
