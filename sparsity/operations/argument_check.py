"""Checks the arrays of a call against its spec, before a kernel gets their addresses.

arrays, sizes and spec (see operands) → nothing, or an ArgumentError

It checks types, devices, ranks and lengths, which is fast because it reads no contents. The values in positions and coordinates
were checked when the tensor was made (see structure). Arrays that are not contiguous are copied later, for the kernel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError, FormatError
from gossamer.sparsity.arrays.structure import INTEGERS, check_lengths
from gossamer.sparsity.compiler.operands import Bound, Spec, bind


def check_arguments(arrays: Sequence[Tensor], sizes: Sequence[int], spec: Spec, dtype: torch.dtype) -> None:
    """ArgumentError unless all operands of a call are of one dtype, on one device, and of the sizes that the letters share."""
    if len(arrays) != sum(operand.arrays for operand in spec.operands):
        raise ArgumentError(f"{_described(spec)} takes {sum(o.arrays for o in spec.operands)} arrays, got {len(arrays)}")
    extents: dict[str, int] = {}
    for operand in bind(arrays, sizes, spec):
        if len(operand.shape) != len(operand.letters):
            raise ArgumentError(f"{_described(spec)}: '{operand.letters}' has the shape {list(operand.shape)}")
        for letter, extent in zip(operand.letters, operand.shape, strict=True):
            if extents.setdefault(letter, extent) != extent:
                raise ArgumentError(f"{_described(spec)}: '{letter}' is {extents[letter]} and {extent}")
        if operand.values.dtype != dtype:
            raise ArgumentError(f"{_described(spec)} of {dtype} and {operand.values.dtype}: convert with .to()")
        for array in operand.arrays:
            if array.device != arrays[0].device or array.layout != torch.strided:
                raise ArgumentError(
                    f"{_described(spec)} of arrays on {arrays[0].device} and on {array.device} ({array.layout}): "
                    "bring all of them to one device, strided"
                )
        if operand.format is not None:
            _check_arrays(operand)


def _check_arrays(operand: Bound) -> None:
    format = operand.format
    assert format is not None
    widths = {"positions": format.pos_width, "coordinates": format.crd_width}
    for (level, kind), array in zip(format.components(), operand.arrays, strict=True):
        if kind in widths and array.dtype != INTEGERS[widths[kind]]:
            raise ArgumentError(f"{kind} of level {level} of {format.name} are {array.dtype}, not {INTEGERS[widths[kind]]}")
    try:
        check_lengths(format, operand.shape, operand.arrays)
    except FormatError as problem:
        raise ArgumentError(str(problem)) from problem


def _described(spec: Spec) -> str:
    return f"{','.join(operand.letters for operand in spec.operands)}->{spec.result.letters}"
