"""Finds the compiled kernel of an operation's call, checks the arrays, and runs it.

`call_of` is the entry: the operations in dense_results.py and sparse_kernels.py get a checked `Call` from it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.open_ops import SampleOp
from gossamer.runtime.elements import ELEMENTS
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.arrays.row_form import RowForm
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Bound, Spec, padded
from gossamer.sparsity.operations.argument_check import check_arguments
from gossamer.sparsity.operations.matrix_calls import RowProduct, RowSample

log = logging.getLogger("gossamer")

Build = Callable[[Spec, torch.dtype], str]
"""Makes contract IR from the spec of a call and its dtype."""

_REMEMBERED = 256  # sets of shapes and types that a call remembers as checked
_SLICES = {16: "slices16", 32: "slices"}


def launch(build: Build, operands: Sequence[Bound], spec: Spec, out: Tensor) -> bool:
    """Runs the kernel of `build` into `out`, with dense operands padded to whole blocks. Returns False if there is none."""
    kernel = kernel_if_any(build, spec, operands[0].values.dtype)
    if kernel is None:
        return False
    sizes = padded(operands) if any(operand.operand.blocked for operand in operands) else {}
    given: list[Any] = []
    kept: list[Bound] = []  # words are addresses, so the arrays must live until the call returns
    for operand in operands:
        if operand.sparse:
            kept.append(Bound(operand.operand, tuple(array.contiguous() for array in operand.arrays), operand.shape))
            given.append(_Arrays(kept[-1]))
        else:
            tensor = operand.values
            if sizes:
                edges = [e for letter, n in zip(operand.letters, operand.shape, strict=True) for e in (sizes[letter] - n, 0)]
                tensor = F.pad(tensor, edges[::-1]) if any(edges) else tensor
            given.append(tensor.contiguous())
    kernel(given, out)
    return True


class _Arrays:
    """A sparse operand for a kernel. Its words are the addresses and lengths of its arrays, and the sizes of its levels."""

    def __init__(self, operand: Bound) -> None:
        assert operand.format is not None
        words = [word for array in operand.arrays for word in (array.data_ptr(), array.numel())]
        shape = operand.shape
        sizes = operand.format.level_sizes(shape) if operand.operand.blocked else [shape[d] for d in operand.operand.level_dims]
        self.words = (*words, *sizes)


@dataclass(frozen=True, eq=False)
class Call:
    """Everything about a call that does not depend on its arrays.

    product  how it is a product with one matrix, None if it is not
    """

    build: Build
    spec: Spec
    dtype: torch.dtype
    product: RowProduct | RowSample | None
    _kernels: dict[tuple[torch.dtype, torch.dtype] | str, RegionKernel] = field(default_factory=dict)
    _fitting: set[tuple[Any, ...]] = field(default_factory=set)

    def check(self, arrays: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """ArgumentError if a kernel cannot take these arrays. Shapes and types that have passed are remembered."""
        key: list[Any] = [*sizes]
        for array in arrays:
            key += array.shape, array.dtype, array.device.index if array.is_cuda else array.is_cpu
        known = tuple(key)
        if known not in self._fitting:
            check_arguments(arrays, sizes, self.spec, self.dtype)
            if len(self._fitting) >= _REMEMBERED:
                self._fitting.clear()
            self._fitting.add(known)

    def kernel(self, form: RowForm) -> RegionKernel:
        """Returns the kernel of the product for a matrix by rows."""
        widths = form.positions.dtype, form.coordinates.dtype
        known = self._kernels.get(widths)
        if known is None:
            assert self.product is not None
            known = self._kernels[widths] = kernel_of(self.build, self.product.canonical(form.format), self.dtype)
        return known

    def as_product(self, arrays: Sequence[Tensor], sizes: Sequence[int]) -> Tensor | None:
        """Returns the result if the call is a product with one matrix that can be read by rows, else None."""
        if isinstance(self.product, RowProduct):
            return self.product.run(self.kernel, arrays, sizes, self.sliced)
        return None if self.product is None else self.product.run(self.kernel, arrays, sizes)

    def sliced(self, width: int) -> RegionKernel:
        """Returns the kernel of a matrix in slices of rows times a vector, for coordinates of `width` bits."""
        schedule = _SLICES[width]
        known = self._kernels.get(schedule)
        if known is None:
            spec = Spec((Operand("rc", Format.CSR.with_widths(32, 32)), Operand("c")), Operand("r"))
            known = self._kernels[schedule] = compile_region(self.build(spec, self.dtype), schedule=schedule)
        return known


_calls: dict[tuple[Any, ...], Call] = {}

Classify = Callable[[Spec], RowProduct | RowSample | None]
"""Returns which product with one matrix a spec is, None if it is none."""


def call_of(build: Build, classify: Classify, text: str, arrays: Sequence[Tensor], sizes: Sequence[int]) -> Call:
    """Returns the call of a spec. ArgumentError if the arrays, as the dispatcher passes them, do not fit the spec.

    All operations get their kernels from here. It takes the arrays so that no operation can forget the check.
    """
    call = planned_call(build, classify, text, arrays[-1].dtype)
    call.check(arrays, sizes)
    return call


def planned_call(build: Build, classify: Classify, text: str, dtype: torch.dtype) -> Call:
    """Returns the call of a spec without checking arrays. Calls are shared, because reading a spec takes longer than a small
    product."""
    key = kernel_of, build, text, dtype
    known = _calls.get(key)
    if known is None:
        if len(_calls) > 4096:
            _calls.clear()
        spec = Spec.parse(text)
        known = _calls[key] = Call(build, spec, dtype, classify(spec) if dtype in ELEMENTS else None)
    return known


@lru_cache(4096)
def kernel_if_any(build: Build, spec: Spec, dtype: torch.dtype) -> RegionKernel | None:
    """Returns the kernel of a call, None if there is none for its dtype, or MLIR cannot compile it."""
    try:
        return kernel_of(build, spec, dtype)
    except CompileError as problem:
        log.info("torch's operations compute %s of %s: %s", spec, dtype, problem)
        return None


@lru_cache(4096)
def kernel_of(build: Build, spec: Spec, dtype: torch.dtype) -> RegionKernel:
    """Returns the fastest kernel of a call: by a schedule for CSR if possible, else by the reference."""
    contract = build(spec, dtype)
    if any(operand.format is not None and operand.format.levels == Format.CSR.levels for operand in spec.operands):
        schedule = "gustavson" if spec.result.format else "dots" if SampleOp.OPERATION_NAME in contract else "rows"
        try:
            return compile_region(contract, schedule=schedule)
        except CompileError:
            pass
    return compile_region(contract, schedule="reference")
