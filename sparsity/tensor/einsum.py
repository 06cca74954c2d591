"""`gossamer.einsum` multiplies sparse and dense tensors, and sums over letters that the result does not have.

einsum("ij,jk->ik", a, x)        SpMM
einsum("ij,ik,jk->ij", a, x, y)  SDDMM: the result has the pattern of a
einsum("ijk,jr,kr->ir", t, b, c) MTTKRP

It calls the operations in sparsity/operations: dense_results.py for dense results and samples, sparse_results.py for others.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Literal

import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format
from gossamer.runtime.operations import one_node, untraced
from gossamer.sparsity.compiler.loop_order import dense_result_order, unblocked
from gossamer.sparsity.compiler.operands import Bound
from gossamer.sparsity.operations.dense_results import einsum as einsum_dense
from gossamer.sparsity.operations.dense_results import sample
from gossamer.sparsity.operations.einsum_order import Order, cheaper_order
from gossamer.sparsity.operations.open_sizes import agree
from gossamer.sparsity.operations.sparse_results import conforming, einsum_sparse, in_format
from gossamer.sparsity.tensor.abbreviations import EinsumError, plain, with_own_letters
from gossamer.sparsity.tensor.block_edges import summed_within
from gossamer.sparsity.tensor.constructor_arguments import format_of
from gossamer.sparsity.tensor.einsum_sketches import note_order, sketches_of
from gossamer.sparsity.tensor.fast_matmul import einsum_at_once
from gossamer.sparsity.tensor.fast_sddmm import sample_at_once
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, bound_to, like, made_of, values_of, wrap


def einsum(expression: str, *operands: Tensor, format: Format | Literal["dense"] | None = None) -> Tensor:
    """Returns the sum of products of an einsum expression, as torch.einsum does. Operands are sparse or dense.

    They have one dtype, unless no letter is summed.

    expression  letters for the dimensions of each operand, "->", letters of the result. Without "->" the result has the letters
                that occur once, in alphabetic order. A letter that occurs twice in an operand means its diagonal. "..." means
                all further dimensions. Sizes of 1 broadcast
    format      the format of the result: a Format, "dense", or None to infer it:
                - one sparse operand, and the result has its letters in its order: the pattern of the operand
                - all operands sparse, at least two, and the result a matrix or more: the format of the first (CSR or CSF if
                  that has blocks)
                - otherwise dense

    Three and more operands are multiplied in the order that is predicted to be cheapest, in pairs or all at once. Gradients
    flow to dense operands and to the values of sparse ones.
    EinsumError if operands and expression do not fit, FormatError if `format` cannot store the result.
    """
    if not isinstance(expression, str) or not all(isinstance(operand, Tensor) for operand in operands):
        kinds = ", ".join(type(each).__name__ for each in (expression, *operands))
        raise EinsumError(f"einsum takes an expression such as 'ij,jk->ik' and tensors, got {kinds}: see torch.as_tensor")
    if isinstance(format, str) and format != "dense":
        format = format_of(format)
    if not torch.compiler.is_compiling():
        operands = tuple([each if each.layout is torch.strided else SparseTensor.from_torch(each) for each in operands])
        expression, operands = plain(expression, operands)
    if len(operands) > 1 and format in (None, "dense") and not torch.compiler.is_compiling():
        inputs, result = _read(expression)
        out = None
        product = len(inputs) == len(operands) == 2 and set(inputs[0]) ^ set(inputs[1]) <= set(result)
        if product and (format == "dense" or result not in inputs):
            out = einsum_at_once(inputs, result, *operands)
        elif format is None and len(set("".join(inputs)) - set(result)) < 2:  # other samples may be cheaper in pairs
            out = sample_at_once(inputs, result, operands)
        if out is not None:
            return out
    return _einsum(expression, None if format is None else str(format), *operands)


def _as_summed(operand: Tensor) -> Tensor:
    """Converts to the dtype of torch's sums: int64 for integers and bools."""
    return operand if operand.dtype.is_floating_point or operand.dtype.is_complex else operand.to(torch.int64)


def of_one_dtype(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns operands in their promoted dtype, as torch multiplies them if it sums nothing."""
    dtype = reduce(torch.promote_types, [operand.dtype for operand in operands])
    return tuple([operand if operand.dtype == dtype else _in(operand, dtype) for operand in operands])


def _in(operand: Tensor, dtype: torch.dtype) -> Tensor:
    return like(operand, values_of(operand).to(dtype)) if isinstance(operand, SparseTensor) else operand.to(dtype)


@untraced
@one_node
def _einsum(expression: str, target: str | None, *operands: Tensor) -> Tensor:
    format: Format | Literal["dense"] | None = None
    if target is not None:
        format = "dense" if target == "dense" else Format.parse(target)
    expression, operands = plain(expression, tuple(operands))
    inputs, result = _parse(expression, operands)
    inputs = with_own_letters(inputs, operands)
    if len(operands) > 1 and set("".join(inputs)) <= set(result):
        operands = of_one_dtype(operands)
    if len(operands) == 1 and len(result) < len(inputs[0]):
        operands = (_as_summed(operands[0]),)
    bound = [bound_to(letters, operand) for letters, operand in zip(inputs, operands, strict=True)]
    _check(expression, bound)
    bound = summed_within(bound, result)
    if not any(isinstance(operand, SparseTensor) for operand in operands):
        equation = ",".join(inputs)
        out = torch.einsum(f"{equation}->{result}", *operands)
        return SparseTensor.from_dense(out, format) if isinstance(format, Format) else out
    if format is None:
        format = _inferred(bound, result)
    order = _order(bound, operands, result, format) if len(operands) > 2 else None
    if order is not None:
        note_order(expression, order, inputs, result, operands)
        return _in_pairs(order, inputs, result, operands, format)
    if format == "dense":
        return _dense(bound, result)
    return _sparse(expression, bound, operands, result, format)


def _order(bound: Sequence[Bound], operands: Sequence[Tensor], result: str, format: Format | Literal["dense"]) -> Order | None:
    """Returns an order that is cheaper than all operands at once, or None. None also for bools and split edge blocks."""
    if bound[0].values.dtype == torch.bool or len(bound) != len(operands):
        return None
    sparse = [at for at, operand in enumerate(bound) if operand.sparse]
    kept = sparse[0] if len(sparse) == 1 and format != "dense" and set(bound[sparse[0]].letters) == set(result) else None
    sketches = sketches_of(bound, operands, result, format != "dense")
    return cheaper_order(sketches, result, sparse=format != "dense", kept=kept)


def _in_pairs(
    order: Order, inputs: Sequence[str], result: str, operands: Sequence[Tensor], format: Format | Literal["dense"]
) -> Tensor:
    """Computes the products of pairs in the order, and then the product of all operands that are left."""
    listed = [*zip(inputs, operands, strict=True)]
    for step in order.steps:
        (a, left), (b, right) = listed[step.first], listed[step.second]
        made = _einsum(f"{a},{b}->{step.letters}", None if step.sparse else "dense", left, right)
        listed = [each for n, each in enumerate(listed) if n not in (step.first, step.second)] + [(step.letters, made)]
    letters, tensors = zip(*listed, strict=True)
    made = _einsum(f"{','.join(letters)}->{result}", str(format), *tensors)
    return made


def _parse(expression: str, operands: Sequence[Tensor]) -> tuple[tuple[str, ...], str]:
    """Returns the letters of each operand and of the result, checked against the operands."""
    inputs, result = _read(expression)
    if len(inputs) != len(operands):
        raise EinsumError(f"einsum '{expression}' has {len(inputs)} operands, got {len(operands)}")
    for letters, operand in zip(inputs, operands, strict=True):
        if len(letters) != operand.dim():
            raise EinsumError(f"einsum '{expression}': '{letters}' names {len(letters)} dimensions of {_described(operand)}")
    return inputs, result


@lru_cache(1024)
def _read(expression: str) -> tuple[tuple[str, ...], str]:
    """Returns the letters of the operands and of the result. EinsumError for an invalid expression."""
    left, arrow, result = expression.replace(" ", "").partition("->")
    inputs = tuple(left.split(","))
    if not all(letters.isalpha() or not letters for letters in [*inputs, result]):
        raise EinsumError(f"einsum '{expression}': only letters, commas, ... and one -> can be read")
    if not arrow:
        result = "".join(sorted(letter for letter in set(left) - {","} if left.count(letter) == 1))
    for letters in (*inputs, result):
        twice = next((letter for letter in letters if letters.count(letter) > 1), None)
        if twice is not None:
            raise EinsumError(f"einsum '{expression}': '{twice}' occurs twice in '{letters}'")
    unknown = sorted(set(result) - set(left))
    if unknown:
        raise EinsumError(f"einsum '{expression}': the result has '{unknown[0]}', which no operand has")
    return inputs, result


def _check(expression: str, bound: Sequence[Bound]) -> None:
    """EinsumError unless sizes and dtypes agree."""
    sizes: dict[str, int] = {}
    for operand in bound:
        for letter, extent in zip(operand.letters, operand.shape, strict=True):
            if not agree(sizes.setdefault(letter, extent), extent):
                raise EinsumError(f"einsum '{expression}': '{letter}' is {sizes[letter]} and {extent}, must be one size")
    types = {operand.values.dtype for operand in bound}
    if len(types) > 1:
        found = " and ".join(sorted(str(dtype) for dtype in types))
        raise EinsumError(f"einsum '{expression}' of {found}: convert the operands to one dtype with .to()")


def _inferred(bound: Sequence[Bound], result: str) -> Format | Literal["dense"]:
    sparse = [operand.operand for operand in bound if operand.operand.format is not None]
    same = next((operand.format for operand in sparse if operand.letters == result), None)
    if same is not None and len(sparse) == 1:
        return same
    first = sparse[0].format
    assert first is not None
    summed = len(bound) == 1 and len(result) < len(bound[0].letters)
    if len(sparse) == len(bound) and len(result) > 1 and not summed:
        return unblocked(first, len(result))
    return "dense"


def _sparse(expression: str, bound: Sequence[Bound], operands: Sequence[Tensor], result: str, format: Format) -> SparseTensor:
    """Computes the einsum with a result in a format."""
    if format.rank != len(result):
        raise FormatError(
            f"einsum '{expression}' has a result of {len(result)} dimensions, {format.name} stores {format.rank}: "
            "give a format of that many dimensions"
        )
    if sum(operand.sparse for operand in bound) == 1:
        at = next(number for number, operand in enumerate(bound) if operand.sparse)
        pattern, tensor = bound[at], operands[at]
        assert isinstance(tensor, SparseTensor)
        if set(pattern.letters) == set(result):
            factors = [operand for number, operand in enumerate(bound) if number != at]
            values = pattern.values * sample(pattern, factors) if factors else pattern.values.clone()
            order = [pattern.letters.index(letter) for letter in result]
            return transposed(like(tensor, values), order).to_format(format)
    if not all(operand.sparse for operand in bound):
        return SparseTensor.from_dense(_dense(bound, result), format)
    return made_of(in_format(lambda plain: einsum_sparse(bound, plain), result, format))


def _dense(bound: Sequence[Bound], result: str) -> Tensor:
    if sum(operand.sparse for operand in bound) > 1:
        bound = conforming(bound, dense_result_order(tuple([operand.operand for operand in bound])))
    return einsum_dense(bound, result)


def transposed(tensor: SparseTensor, order: Sequence[int]) -> SparseTensor:
    """Returns the tensor with its dimensions in another order: the same arrays in the permuted format.

    MLIR cannot permute a format that blocks only its last dimensions, such as N:M. It is converted to CSR or CSF first.
    """
    order = [dim % tensor.dim() for dim in order]
    if order == sorted(order):
        return tensor
    blocked = [level.block > 1 for level in sorted(tensor.format.levels, key=lambda level: order.index(level.dim))]
    if blocked != sorted(blocked):
        tensor = tensor.to_format(unblocked(tensor.format, tensor.dim()))
    shape = [tensor.shape[dim] for dim in order]
    return wrap(tensor.format.permuted(order), shape, tensor.components[:-1], values_of(tensor))


def _described(operand: Tensor) -> str:
    kind = operand.format.name if isinstance(operand, SparseTensor) else "a tensor"
    return f"{kind} of shape {tuple(operand.shape)}"
