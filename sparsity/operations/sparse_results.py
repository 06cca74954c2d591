"""The operations with sparse results, whose number of entries is known only after they have run.

    gossamer::einsum_sparse(arrays, sizes, spec) -> Tensor[]    products of sparse operands
    gossamer::add_sparse(arrays, sizes, spec) -> Tensor[]       the union of two
    gossamer::convert(arrays, sizes, spec) -> Tensor[]          the same tensor in another format, with all stored zeros
    gossamer::compress(arrays, sizes, spec) -> Tensor[]         the same without the zeros that pad blocks
    gossamer::pick(arrays, sizes, spec) -> Tensor               the values of the first operand at the entries of the second

The arrays of a result are its components. The gradients of all these operations use `pick`: the gradient of a value is the
gradient at the same coordinates of the other pattern.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.runtime.operations import Operation
from gossamer.runtime.torch_internals import detect_fake_mode, get_proxy_mode
from gossamer.sparsity.arrays.structure import INTEGERS, sharing
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.loop_order import level_letters, sparse_result_order, unblocked, walkable
from gossamer.sparsity.compiler.operands import ARGUMENTS, Bound, Spec, bind, extents, flat
from gossamer.sparsity.operations import entry_products, sparse_kernels
from gossamer.sparsity.operations.batches import batched_one_by_one
from gossamer.sparsity.operations.dense_results import densified, gradients, sample, total, varied
from gossamer.sparsity.operations.derivatives import Backward, Derivative
from gossamer.sparsity.operations.sparse_product import sparse_product


def einsum_sparse(operands: Sequence[Bound], result: Operand) -> Bound:
    """Returns the einsum of sparse operands in the format of `result`. Operands in unsuitable level orders are converted."""
    spec = Spec(tuple(operand.operand for operand in operands), result)
    if sparse_product(spec, operands[0].values.dtype) is None:
        operands = conforming(operands, sparse_result_order(spec.operands, result))
    return _result("einsum_sparse", operands, result)


def add_sparse(left: Bound, right: Bound, result: Operand) -> Bound:
    """Returns left + right."""
    return _result("add_sparse", conforming([left, right], level_letters(result)), result)


def in_format(make: Callable[[Operand], Bound], letters: str, format: Format) -> Bound:
    """Returns the result of `make` in a format. If kernels cannot write the format, the result is converted to it."""
    plain = Operand(letters, unblocked(format, len(letters)))
    if plain.format == format:
        return make(plain)
    with sizes_stay_inside():
        made = make(plain)
    return compress(made, format)


def convert(operand: Bound, format: Format) -> Bound:
    """Returns the same tensor in another format, with all stored zeros."""
    return _result("convert", [operand], Operand(operand.letters, format))


def compress(operand: Bound, format: Format) -> Bound:
    """Returns the same tensor in another format, without the zeros that pad blocks or groups."""
    return _result("compress", [operand], Operand(operand.letters, format))


def pick(source: Bound, pattern: Bound) -> Tensor:
    """Returns the values of `source` at the entries of `pattern` (flat), 0 where `source` stores none."""
    out: Tensor = _call["pick"](*flat([source, pattern], Operand("p")))
    return out


def conforming(operands: Sequence[Bound], order: Sequence[str]) -> list[Bound]:
    """Returns the operands in formats whose levels follow this order of the letters.

    None of them has blocks, because MLIR iterates over the blocks of one operand only.
    """
    found = []
    for each in operands:
        if each.format is not None:
            plain = unblocked(each.format, len(each.letters))
            format = walkable(Operand(each.letters, plain), order)
            if each.format != format:
                with sizes_stay_inside():
                    each = convert(each, format)
        found.append(each)
    return found


@contextmanager
def sizes_stay_inside() -> Iterator[None]:
    """Hides new open sizes from Dynamo within the context, while Dynamo infers the result of a function that it does not trace.

    It would refuse sizes that are not in the result.
    """
    mode = detect_fake_mode()
    if mode is None or mode.shape_env is None or get_proxy_mode() is not None:
        yield
    else:
        with mode.shape_env.ignore_fresh_unbacked_symbols():
            yield


def _result(name: str, operands: Sequence[Bound], result: Operand) -> Bound:
    return _bound(result, _call[name](*flat(operands, result)), operands)


def _bound(result: Operand, arrays: Sequence[Tensor], operands: Sequence[Bound]) -> Bound:
    """Returns an operand of these arrays, with the sizes of the operands' letters."""
    sizes = extents(operands)
    return Bound(result, tuple(arrays), tuple(sizes[letter] for letter in result.letters))


# Shapes for tracing


def _sparse_fake(arrays: list[Tensor], sizes: list[int], text: str) -> list[Tensor]:
    spec = Spec.parse(text)
    format = spec.result.format
    assert format is not None
    exact = extents(bind(arrays, sizes, spec))
    level_sizes = format.level_sizes([exact[letter] for letter in spec.result.letters])
    context, like = torch.library.get_ctx(), arrays[-1]
    stored = set(format.components())
    made: list[Tensor] = []
    count: Any = 1
    for number, level in enumerate(format.levels):
        if (number, "positions") in stored:
            length = 2 * count if level.kind == "loose_compressed" else count + 1
            made.append(like.new_empty([length], dtype=INTEGERS[format.pos_width]))
            count = context.new_dynamic_size(min=0)
        elif level.structured:
            count = count * level.structured[0]
        elif level.kind == "dense":
            count = count * level_sizes[number]
        if (number, "coordinates") in stored:
            levels = sharing(format, number)
            made.append(like.new_empty([count, levels] if levels > 1 else [count], dtype=INTEGERS[format.crd_width]))
    return [*made, like.new_empty([count])]


def _pick_fake(arrays: list[Tensor], sizes: list[int], text: str) -> Tensor:
    values = arrays[-1]
    return values.new_empty(values.shape)


# Derivatives


def _kept(ctx: Any) -> tuple[list[Bound], Bound]:
    """Returns the saved operands and result of a call."""
    saved, spec = ctx.saved_tensors, Spec.parse(ctx.spec)
    inputs = sum(operand.arrays for operand in spec.operands)
    operands = bind(saved[:inputs], ctx.sizes, spec)
    return operands, _bound(spec.result, saved[inputs:], operands)


def _backward(derivative: Callable[[list[Bound], int, Bound], Tensor]) -> Backward:
    """Makes the backward of an operation from a function of the operands, a number `at`, and the gradient of the result."""

    def backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
        operands, result = _kept(ctx)
        return gradients(ctx, operands, lambda at: derivative(operands, at, result.with_values(grad)))

    return backward


def _tangent_of_einsum(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    operands, result = _kept(ctx)
    return total(_result("einsum_sparse", each, result.operand).values for _, each in varied(operands, tangents))


def _tangent_at_entries(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    """Returns the tangent of an operation that is the sum of its operands."""
    operands, result = _kept(ctx)
    return total(pick(each[at], result) for at, each in varied(operands, tangents))


def _of_einsum(operands: list[Bound], at: int, grad: Bound) -> Tensor:
    own, others = operands[at], [*operands[:at], *operands[at + 1 :], grad]
    known = {letter for other in others for letter in other.letters}
    if not set(own.letters) <= known or own.format is None:
        return sample(own, [densified(other) for other in others])
    # Computes the whole derivative in a format, and picks the entries of the operand.
    whole = einsum_sparse(others, Operand(own.letters, Format.csf(len(own.letters))))
    return pick(whole, own)


def _at_own_entries(operands: list[Bound], at: int, grad: Bound) -> Tensor:
    return pick(grad, operands[at])


def _pick_backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    source, pattern = bind(ctx.saved_tensors, ctx.sizes, Spec.parse(ctx.spec))
    weighted = pattern.with_values(grad)
    return gradients(ctx, [source, pattern], lambda at: None if at else pick(weighted, source))


def _pick_tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    source, pattern = bind(ctx.saved_tensors, ctx.sizes, Spec.parse(ctx.spec))
    picked = total(pick(each, pattern) for _, (each,) in varied([source], tangents[: len(source.arrays)]))
    return torch.zeros_like(pattern.values) if picked is None else picked  # the pattern's values are not read


# The operations

_call: dict[str, Callable[..., Any]] = {}
for _name, _kernel, _on_cuda, _of_operands, _of_result in (
    ("einsum_sparse", sparse_kernels.einsum_sparse, entry_products.einsum_sparse, _of_einsum, _tangent_of_einsum),
    ("add_sparse", sparse_kernels.add_sparse, entry_products.add_sparse, _at_own_entries, _tangent_at_entries),
    ("convert", sparse_kernels.convert, sparse_kernels.convert, _at_own_entries, _tangent_at_entries),
    ("compress", sparse_kernels.compress, sparse_kernels.compress, _at_own_entries, _tangent_at_entries),
):
    _call[_name] = Operation(
        f"{_name}{ARGUMENTS} -> Tensor[]",
        _kernel,
        _on_cuda,
        _sparse_fake,
        Derivative("arrays result", _backward(_of_operands), _of_result, result=-1),
        batched_one_by_one,
    ).register()
_call["pick"] = Operation(
    f"pick{ARGUMENTS} -> Tensor",
    sparse_kernels.pick,
    sparse_kernels.pick,
    _pick_fake,
    Derivative("arrays", _pick_backward, _pick_tangent),
    batched_one_by_one,
).register()
