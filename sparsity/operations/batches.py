"""Implements torch.func.vmap: a batch of dense operands of an einsum is one larger einsum, other batches run one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.errors import GossamerError
from gossamer.runtime.operations import LIBRARY
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Spec

_LETTERS = "abcdefghijklmnopqrstuvwxyz"

Batched = tuple[Any, Any]
"""Outputs, and for each its batch dimension, None if it is the same for the whole batch."""


def batched_one_by_one(name: str) -> None:
    """Makes vmap compute gossamer::name for each element of a batch. Integer outputs must be the same for all elements."""
    operation = getattr(torch.ops.gossamer, name).default

    def rule(info: Any, in_dims: Any, *inputs: Any) -> Batched:
        results = [operation(*_element(inputs, in_dims, number)) for number in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return _joined(name, results)
        outputs, dims = zip(*(_joined(name, each) for each in zip(*results, strict=True)), strict=True)
        return type(results[0])(outputs), type(results[0])(dims)

    torch.library.register_vmap(f"gossamer::{name}", rule, lib=LIBRARY)


def batched_as_einsum(name: str) -> None:
    """Makes vmap compute gossamer::name, an einsum, with an additional dimension, or with a larger dimension."""
    operation = getattr(torch.ops.gossamer, name).default

    def rule(info: Any, in_dims: Any, arrays: Sequence[Tensor], sizes: Sequence[int], text: str) -> Batched:
        spec = Spec.parse(text)
        dims = _split(in_dims[0], spec)
        of_sparse = [own for own, operand in zip(dims, spec.operands, strict=True) if operand.format is not None]
        if any(dim is not None for own in of_sparse for dim in own):
            results = [operation(*_element((arrays, sizes, text), in_dims, number)) for number in range(info.batch_size)]
            return torch.stack(results), 0
        return _as_one(operation, arrays, sizes, spec, [own[-1] for own in dims], info.batch_size)

    torch.library.register_vmap(f"gossamer::{name}", rule, lib=LIBRARY)


def _as_one(
    operation: Callable[..., Tensor],
    arrays: Sequence[Tensor],
    sizes: Sequence[int],
    spec: Spec,
    dims: Sequence[int | None],
    n: int,
) -> Batched:
    """Computes one einsum for a batch of dense operands. `dims` has the batch dimension of each operand."""
    inputs, result = [operand.letters for operand in spec.operands], spec.result.letters
    of_batch = {number: dim for number, dim in enumerate(dims) if dim is not None}
    ends = [sum(operand.arrays for operand in spec.operands[: number + 1]) - 1 for number in range(len(inputs))]
    found = list(arrays)
    number, dim = next(iter(of_batch.items()))
    free = next((c for c in inputs[number] if c in result and sum(c in each for each in inputs) == 1), None)
    if len(of_batch) == 1 and free is not None:  # a matrix of more columns has a faster kernel than an array of matrices
        at = inputs[number].index(free)
        found[ends[number]] = found[ends[number]].movedim(dim, at).flatten(at, at + 1)
        at = result.index(free)
        return operation(found, sizes, str(spec)).unflatten(at, (n, -1)), at
    batch = next(letter for letter in _LETTERS if not any(letter in each for each in inputs))
    for number, dim in of_batch.items():
        found[ends[number]] = found[ends[number]].movedim(dim, -1)
    operands = (Operand(o.letters + batch if k in of_batch else o.letters, o.format) for k, o in enumerate(spec.operands))
    return operation(found, sizes, str(Spec(tuple(operands), Operand(result + batch)))), len(result)


def _split(dims: Sequence[int | None], spec: Spec) -> list[list[int | None]]:
    """Returns the batch dimensions of the arrays of each operand."""
    remaining = iter(dims)
    return [[next(remaining) for _ in range(operand.arrays)] for operand in spec.operands]


def _element(inputs: Any, in_dims: Any, number: int) -> Any:
    """Returns the inputs of a call for one element of a batch."""
    if isinstance(inputs, Tensor):
        return inputs if in_dims is None else inputs.select(in_dims, number)
    if isinstance(inputs, list | tuple) and in_dims is not None:
        return [_element(each, dim, number) for each, dim in zip(inputs, in_dims, strict=True)]
    return inputs


def _joined(name: str, results: Sequence[Tensor]) -> tuple[Tensor, int | None]:
    """Returns the results of a batch as one tensor, and its batch dimension."""
    first = results[0]
    if first.is_floating_point() or first.is_complex():
        return torch.stack(tuple(results)), 0
    if any(not torch.equal(first, each) for each in results):
        raise GossamerError(
            f"vmap: {name} gives the tensors of a batch different patterns, which no SparseTensor holds; call it for each"
        )
    return first, None
