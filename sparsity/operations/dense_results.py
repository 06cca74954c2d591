"""The operations with dense results. Each is the derivative of the other, so derivatives of any order run compiled, too.

gossamer::einsum(arrays, sizes, spec) -> Tensor    sums of products
gossamer::sample(arrays, sizes, spec) -> Tensor    sums of products at the stored entries of the first operand, one value each
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.runtime.memory.warm_memory import empty
from gossamer.runtime.modules import sizes as known_sizes
from gossamer.runtime.operations import Operation
from gossamer.sparsity.arrays.row_form import RowForm
from gossamer.sparsity.compiler import contract_ir
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.gpu_kernels import LoadedKernel, loaded_kernel
from gossamer.sparsity.compiler.operands import ARGUMENTS, Bound, Spec, bind, dense, extents, flat, padded
from gossamer.sparsity.operations import entry_products
from gossamer.sparsity.operations.batches import batched_as_einsum, batched_one_by_one
from gossamer.sparsity.operations.calls import Call, call_of, launch
from gossamer.sparsity.operations.derivatives import Derivative
from gossamer.sparsity.operations.matrix_calls import RowProduct, RowSample


def einsum(operands: Sequence[Bound], result: str) -> Tensor:
    """Returns out[result] = sum over all other letters of the product of the operands. At least one is sparse."""
    out: Tensor = einsum_of(*flat(operands, Operand(result)))
    return out


def sample(pattern: Bound, factors: Sequence[Bound]) -> Tensor:
    """Returns the product of dense factors at each stored entry (flat), summed over the letters that the pattern lacks."""
    out: Tensor = _sample(*flat([pattern, *factors], Operand("p")))
    return out


def densified(operand: Bound) -> Bound:
    """Returns the operand as a dense one; itself if it is dense."""
    return dense(operand.letters, einsum([operand], operand.letters)) if operand.sparse else operand


# Kernels


def einsum_ir(spec: Spec, dtype: torch.dtype) -> str:
    """Returns the contract IR of a call of einsum."""
    return contract_ir.einsum(spec.operands, spec.result, dtype)


def sample_ir(spec: Spec, dtype: torch.dtype) -> str:
    """Returns the contract IR of a call of sample."""
    return contract_ir.sample(spec.operands[0], spec.operands[1:], dtype)


def einsum_on_cpu(arrays: Sequence[Tensor], sizes: Sequence[int], text: str) -> Tensor:
    """Computes `gossamer::einsum` for CPU tensors."""
    call = call_of(einsum_ir, RowProduct.of, text, arrays, sizes)
    product = call.as_product(arrays, sizes)
    if product is not None:
        return product
    spec, operands = call.spec, bind(arrays, sizes, call.spec)
    whole = padded(operands)
    out = empty([whole[letter] for letter in spec.result.letters], arrays[-1].dtype)
    if out.numel() and not launch(einsum_ir, operands, spec, out):
        return entry_products.einsum(arrays, sizes, text)
    exact = extents(operands)
    if exact == whole:
        return out
    for dim, letter in enumerate(spec.result.letters):
        out = out.narrow(dim, 0, exact[letter])
    return out.contiguous()


def sample_on_cpu(arrays: Sequence[Tensor], sizes: Sequence[int], text: str) -> Tensor:
    """Computes `gossamer::sample` for CPU tensors."""
    call = call_of(sample_ir, RowSample.of, text, arrays, sizes)
    product = call.as_product(arrays, sizes)
    if product is not None:
        return product
    spec, operands = call.spec, bind(arrays, sizes, call.spec)
    out = operands[0].values.new_empty(operands[0].values.numel())
    if out.numel() and not launch(sample_ir, operands, spec, out):
        return entry_products.sample(arrays, sizes, text)
    return out


# Shapes for tracing


def _einsum_fake(arrays: list[Tensor], sizes: list[int], text: str) -> Tensor:
    spec = Spec.parse(text)
    exact = extents(bind(arrays, sizes, spec))
    return arrays[-1].new_empty([exact[letter] for letter in spec.result.letters])


def _sample_fake(arrays: list[Tensor], sizes: list[int], text: str) -> Tensor:
    values = bind(arrays, sizes, Spec.parse(text))[0].values
    return values.new_empty(values.shape)


# Derivatives


def _einsum_backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    spec = Spec.parse(ctx.spec)
    operands = bind(ctx.saved_tensors, ctx.sizes, spec)
    result = dense(spec.result.letters, grad)
    return gradients(ctx, operands, lambda at: _derivative(operands, at, [result]))


def _einsum_tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    spec = Spec.parse(ctx.spec)
    changed = varied(bind(ctx.saved_tensors, ctx.sizes, spec), tangents)
    return total(einsum(each, spec.result.letters) for _, each in changed)


def _sample_backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    pattern, *factors = bind(ctx.saved_tensors, ctx.sizes, Spec.parse(ctx.spec))
    weighted = [pattern.with_values(grad), *factors]
    return gradients(ctx, weighted, lambda at: _derivative(weighted, at, []) if at else None)


def _sample_tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    pattern, *factors = bind(ctx.saved_tensors, ctx.sizes, Spec.parse(ctx.spec))
    sampled = total(sample(pattern, each) for _, each in varied(factors, tangents[len(pattern.arrays) :]))
    return torch.zeros_like(pattern.values) if sampled is None else sampled  # the pattern's values are not read


def gradients(ctx: Any, operands: Sequence[Bound], gradient: Callable[[int], Tensor | None]) -> list[Tensor | None]:
    """Returns an entry for each array of a call: the gradient of an operand's values if needed, None for other arrays."""
    needed: Iterator[bool] = iter(ctx.needs_input_grad[2:])
    found: list[Tensor | None] = []
    for at, operand in enumerate(operands):
        needs = [next(needed) for _ in operand.arrays]
        found += [None] * (len(needs) - 1)
        found.append(gradient(at) if needs[-1] else None)
    return found


def varied(operands: Sequence[Bound], tangents: Iterable[Tensor | None]) -> Iterator[tuple[int, list[Bound]]]:
    """Yields, for each operand with a tangent, its number and all operands, with the tangent as its values.

    `tangents` has one entry for each array.
    """
    of_arrays = iter(tangents)
    for at, operand in enumerate(operands):
        *_, tangent = (next(of_arrays) for _ in operand.arrays)
        if tangent is not None:
            yield at, [*operands[:at], operand.with_values(tangent), *operands[at + 1 :]]


def total(terms: Iterable[Tensor]) -> Tensor | None:
    """Returns the sum of the terms, None if there are none."""
    found = None
    for term in terms:
        found = term if found is None else found + term
    return found


def _derivative(operands: Sequence[Bound], at: int, more: Sequence[Bound]) -> Tensor:
    """Returns the derivative of the sum of products of all operands and `more`, with respect to the values of one operand."""
    own, others = operands[at], [*operands[:at], *operands[at + 1 :], *more]
    if own.format is not None:
        # Padding of edge blocks is no part of the tensor: the kernel pads these ones by zeros, so its gradient is 0.
        filled = zip(own.letters, own.shape, own.format.padded_shape(own.shape), strict=True)
        edges = [dense(letter, own.values.new_ones(n)) for letter, n, whole in filled if known_sizes.guard_or_true(n != whole)]
        return sample(own, [*(densified(other) for other in others), *edges])
    known = {letter for other in others for letter in other.letters}
    gradient = _product(others, "".join(letter for letter in own.letters if letter in known))
    alone = [dim for dim, letter in enumerate(own.letters) if letter not in known]
    for dim in alone:
        gradient = gradient.unsqueeze(dim)
    return gradient.expand(own.shape) if alone else gradient


def _product(operands: Sequence[Bound], result: str) -> Tensor:
    """Computes einsum, by torch if no operand is sparse."""
    if any(operand.sparse for operand in operands):
        return einsum(operands, result)
    equation = ",".join(operand.letters for operand in operands)
    return torch.einsum(f"{equation}->{result}", *(operand.values for operand in operands))


# The operations


def einsum_on_cuda(arrays: list[Tensor], sizes: list[int], text: str) -> Tensor:
    """Computes `gossamer::einsum` for CUDA tensors: by rows if it is a product with one matrix, else by entries."""
    out = _by_rows(call_of(einsum_ir, RowProduct.of, text, arrays, sizes), "rows", arrays, sizes)
    return entry_products.einsum(arrays, sizes, text) if out is None else out


def sample_on_cuda(arrays: list[Tensor], sizes: list[int], text: str) -> Tensor:
    """Computes `gossamer::sample` for CUDA tensors."""
    out = _by_rows(call_of(sample_ir, RowSample.of, text, arrays, sizes), "dots", arrays, sizes)
    return entry_products.sample(arrays, sizes, text) if out is None else out


def _by_rows(call: Call, schedule: str, arrays: Sequence[Tensor], sizes: Sequence[int]) -> Tensor | None:
    """Returns a product with one matrix by our kernel for GPUs, None if it is no such product or has no kernel."""
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
    """There is no GPU kernel for a product."""


einsum_of = Operation(
    f"einsum{ARGUMENTS} -> Tensor",
    einsum_on_cpu,
    einsum_on_cuda,
    _einsum_fake,
    Derivative("arrays", _einsum_backward, _einsum_tangent),
    batched_as_einsum,
).register()
"""Calls `gossamer::einsum` with arrays, sizes and a spec."""
_sample = Operation(
    f"sample{ARGUMENTS} -> Tensor",
    sample_on_cpu,
    sample_on_cuda,
    _sample_fake,
    Derivative("arrays", _sample_backward, _sample_tangent),
    batched_one_by_one,
).register()
