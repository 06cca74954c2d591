"""Operations on segments of entries, such as the rows of a CSR matrix: reductions, softmax and its gradient.

    gossamer::segment_reduce(positions, values, kind, extent) -> Tensor   "sum", "prod", "amax" or "amin" of each segment
    gossamer::softmax(positions, values, log) -> Tensor                   softmax, or its logarithm, within each segment
    gossamer::softmax_backward(positions, grad, output, log) -> Tensor    its derivative

positions   [segments + 1], of any integer type: segment s has the entries from positions[s] to positions[s + 1]
values      [entries]

They are kernels of `lower-segments`: parallel over shares of equal work, a segment stays in registers or cache.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gossamer.runtime.operations import LIBRARY, TAGS, implement
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity import segment_ir
from gossamer.sparsity.entries import as_int64
from gossamer.sparsity.kernels import compile_region


def segment_reduce(positions: Tensor, values: Tensor, kind: str, extent: int = 0) -> Tensor:
    """[segments]: "sum", "prod", "amax" or "amin" of each.

    A segment stands for `extent` elements, of which those without entry are 0. With extent = 0 there are the entries only,
    and without any the result is 0, 1, the lowest or the highest number.
    """
    out: Tensor = torch.ops.gossamer.segment_reduce.default(positions, values, kind, extent)
    return out


def segment_softmax(positions: Tensor, values: Tensor, log: bool = False) -> Tensor:
    """[entries]: the softmax of each segment, or its logarithm."""
    out: Tensor = torch.ops.gossamer.softmax.default(positions, values, log)
    return out


def spread(positions: Tensor, values: Tensor, entries: int) -> Tensor:
    """[entries]: for each entry the value of its segment, of [segments] values."""
    return values.repeat_interleave(as_int64(positions).diff(), output_size=entries)


def with_missing(positions: Tensor, reduced: Tensor, kind: str, extent: int) -> Tensor:
    """What becomes of reduced entries where elements without entry count as well (see `segment_reduce`)."""
    if kind == "sum" or not extent:
        return reduced
    with_zero = {"prod": torch.zeros_like, "amax": lambda o: o.clamp(min=0), "amin": lambda o: o.clamp(max=0)}[kind]
    return torch.where(as_int64(positions).diff() < extent, with_zero(reduced), reduced)


# How they run


@lru_cache(256)
def _kernel(build: Callable[..., str], positions: torch.dtype, dtype: torch.dtype, option: str | bool) -> RegionKernel:
    return compile_region(build(positions, dtype, option), schedule="segments")


def _run(build: Callable[..., str], positions: Tensor, operands: list[Tensor], option: str | bool, out: Tensor) -> Tensor:
    if out.numel():
        kernel = _kernel(build, positions.dtype, operands[0].dtype, option)
        kernel([positions.contiguous(), *(operand.contiguous() for operand in operands)], out)
    return out


def _reduce_cpu(positions: Tensor, values: Tensor, kind: str, extent: int) -> Tensor:
    out = _run(segment_ir.reduce, positions, [values], kind, values.new_empty(positions.numel() - 1))
    return with_missing(positions, out, kind, extent)


def _softmax_cpu(positions: Tensor, values: Tensor, log: bool) -> Tensor:
    return _run(segment_ir.softmax, positions, [values], log, values.new_empty(values.numel()))


def _softmax_backward_cpu(positions: Tensor, grad: Tensor, output: Tensor, log: bool) -> Tensor:
    return _run(segment_ir.softmax_backward, positions, [grad, output], log, output.new_empty(output.numel()))


# What tracing sees


def _reduce_fake(positions: Tensor, values: Tensor, kind: str, extent: int) -> Tensor:
    return values.new_empty([positions.shape[0] - 1])


def _softmax_fake(positions: Tensor, values: Tensor, *_: Any) -> Tensor:
    return values.new_empty(values.shape)


# How they are differentiated


def _setup_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    positions, values, ctx.kind, ctx.extent = inputs
    ctx.save_for_backward(positions, values, output)


def _reduce_backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
    positions, values, out = ctx.saved_tensors
    entries = values.shape[0]
    if ctx.kind == "sum":
        return None, spread(positions, grad, entries), None, None
    missing = ctx.extent - as_int64(positions).diff() if ctx.extent else torch.zeros_like(out, dtype=torch.int64)
    if ctx.kind == "prod":
        share = torch.where(missing > 0, 0, grad)
        return None, _of_product(positions, values, entries) * spread(positions, share, entries), None, None
    # As torch has it: the gradient is shared evenly among those that are equal, zeros without entry too.
    ties = (values == spread(positions, out, entries)).to(values.dtype)
    count = segment_reduce(positions, ties, "sum") + torch.where(out == 0, missing, 0)
    return None, ties * spread(positions, grad / count, entries), None, None


def _of_product(positions: Tensor, values: Tensor, entries: int) -> Tensor:
    """For each entry the product of the others in its segment."""
    zero = values == 0
    filled = torch.where(zero, 1, values)
    others = spread(positions, segment_reduce(positions, filled, "prod"), entries) / filled
    zeros = spread(positions, segment_reduce(positions, zero.to(values.dtype), "sum"), entries)
    return torch.where(zeros == zero.to(values.dtype), others, 0)


def _setup_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    positions, _, ctx.log = inputs
    ctx.save_for_backward(positions, output)


def _softmax_gradient(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
    positions, output = ctx.saved_tensors
    return None, torch.ops.gossamer.softmax_backward.default(positions, grad, output, ctx.log), None


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    positions, grad, result, ctx.log = inputs
    ctx.save_for_backward(positions, grad, result)


def _second_gradient(ctx: Any, more: Tensor) -> tuple[None, Tensor, Tensor, None]:
    """The derivatives of y * (grad - sum(grad * y)), or of grad - exp(y) * sum(grad), with respect to grad and y."""
    positions, grad, y = ctx.saved_tensors

    def total(values: Tensor) -> Tensor:
        return spread(positions, segment_reduce(positions, values, "sum"), values.shape[0])

    if ctx.log:
        weighted = y.exp() * more
        return None, more - total(weighted), -weighted * total(grad), None
    weighted = y * more
    return None, weighted - y * total(weighted), more * (grad - total(grad * y)) - grad * total(weighted), None


for _name, _signature, _cpu, _fake, _backward, _setup in (
    ("segment_reduce", "(Tensor positions, Tensor values, str kind, SymInt extent)", _reduce_cpu, _reduce_fake,
     _reduce_backward, _setup_reduce),
    ("softmax", "(Tensor positions, Tensor values, bool log)", _softmax_cpu, _softmax_fake, _softmax_gradient, _setup_softmax),
    ("softmax_backward", "(Tensor positions, Tensor grad, Tensor output, bool log)", _softmax_backward_cpu, _softmax_fake,
     _second_gradient, _setup_backward),
):  # fmt: skip
    LIBRARY.define(f"{_name}{_signature} -> Tensor", tags=TAGS)
    implement(_name, _cpu)
    torch.library.register_fake(f"gossamer::{_name}", _fake, lib=LIBRARY)
    torch.library.register_autograd(f"gossamer::{_name}", _backward, setup_context=_setup, lib=LIBRARY)
