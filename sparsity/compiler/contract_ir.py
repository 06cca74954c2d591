"""Builds contract IR of the operations on sparse tensors, for any formats, ranks and sizes.

    einsum    out[...] = sum of products                        linalg.generic, result dense or in a format
    sample    sums of products at the entries of a pattern      kernel.sample
    add       the union of two tensors                          linalg.generic, result in a format

All sizes are open, so that one kernel serves every shape.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch_mlir import ir
from torch_mlir.dialects import tensor

from gossamer.dialects.format import Format
from gossamer.dialects.kernel import ReadOp, end, integer
from gossamer.dialects.open_ops import SampleOp
from gossamer.passes.framework.context import building
from gossamer.passes.loops.scalars import Scalars
from gossamer.passes.loops.vectors import index
from gossamer.sparsity.compiler.op_ir import element_of, function_of


@dataclass(frozen=True)
class Operand:
    """A tensor of a contraction: a letter for each dimension, and its format (None: dense)."""

    letters: str
    format: Format | None = None

    @cached_property
    def arrays(self) -> int:
        """The number of arrays that store it."""
        return len(self.format.components()) if self.format is not None else 1

    @cached_property
    def blocked(self) -> bool:
        """Whether it has blocks, so that its kernels may cover more than its shape."""
        return self.format is not None and any(level.block > 1 for level in self.format.levels)

    @cached_property
    def level_dims(self) -> tuple[int, ...]:
        """The dimension of each level."""
        return tuple(level.dim for level in self.format.levels) if self.format is not None else ()


def einsum(operands: Sequence[Operand], result: Operand, dtype: torch.dtype) -> str:
    """Returns the IR of out[result] = sum over all other letters of the product of the operands."""
    operands = [_by_levels(operand) for operand in operands]
    return _region(operands, dtype, lambda scalars, given: _contract(scalars, operands, given, result))


def sample(pattern: Operand, factors: Sequence[Operand], dtype: torch.dtype) -> str:
    """Returns the IR of values[p] = product of the factors at stored entry p, summed over letters that the pattern lacks."""
    pattern = _by_levels(pattern)

    def build(scalars: Scalars, given: list[ir.Value]) -> ir.Value:
        reduced = sorted({letter for factor in factors for letter in factor.letters} - set(pattern.letters))
        letters = "".join([pattern.letters, *reduced])
        count = integer(len(reduced))
        op = SampleOp(given[0], count, result=_type("p", None, scalars.element))
        with ir.InsertionPoint(ir.Block.create_at_start(op.body, [], [])):
            reads = [
                ReadOp(tensor, _map(letters, factor.letters), result=scalars.element).result
                for tensor, factor in zip(given[1:], factors, strict=True)
            ]
            end(scalars.product([scalars.widened(read) for read in reads]))
        return op.result

    return _region([pattern, *factors], dtype, build)


def add(left: Operand, right: Operand, result: Operand, dtype: torch.dtype) -> str:
    """Returns the IR of left + right, with the entries of either."""

    def build(scalars: Scalars, given: list[ir.Value]) -> ir.Value:
        def body(arguments: list[ir.Value]) -> ir.Value:
            return scalars.narrowed(scalars.add(*(scalars.widened(a) for a in arguments[:2])))

        start = _empty(result, scalars.element, _sizes([left, right], given))
        return _generic(result.letters, [left, right], result, given, start, body)

    return _region([left, right], dtype, build)


def _by_levels(operand: Operand) -> Operand:
    """Returns the same operand with its dimensions reordered: those without blocks in the order of levels, then the blocked.

    MLIR inverts blocked maps of other orders wrongly (d0 and d1 in (d1, d0, d2 floordiv 3, d2 mod 3)). The arrays stay.
    """
    if operand.format is None or not operand.blocked:
        return operand
    blocked = [level.dim for level in operand.format.levels if level.block > 1]
    order = [*(level.dim for level in operand.format.levels if level.block == 1), *sorted(set(blocked))]
    return Operand("".join(operand.letters[dim] for dim in order), operand.format.permuted(order))


def _region(operands: Sequence[Operand], dtype: torch.dtype, build: Callable[[Scalars, list[ir.Value]], ir.Value]) -> str:
    """Returns a module with one function of these operands. `build` makes its result."""
    with building():
        element = element_of(dtype)
        types = [_type(operand.letters, operand.format, element) for operand in operands]
        return function_of(types, lambda *given: [build(Scalars(element), list(given))])


def _contract(scalars: Scalars, operands: Sequence[Operand], given: list[ir.Value], result: Operand) -> ir.Value:
    reduced = sorted({letter for operand in operands for letter in operand.letters} - set(result.letters))
    # MLIR inverts a blocked map correctly only if blocked dimensions come last.
    blocked = {o.letters[level.dim] for o in operands if o.format for level in o.format.levels if level.block > 1}
    letters, sizes = "".join(sorted([*result.letters, *reduced], key=blocked.__contains__)), _sizes(operands, given)
    sums = scalars.wide if result.format is None else scalars.element
    start = _empty(result, sums, sizes)
    if result.format is None:
        from torch_mlir.dialects import linalg  # imported here: it takes 0.1 s, and kernels from the cache need none of it

        start = linalg.fill(scalars.zero(), outs=[start])

    def body(arguments: list[ir.Value]) -> ir.Value:
        *factors, total = arguments
        product = scalars.product([scalars.widened(factor) for factor in factors])
        wide = scalars.add(scalars.widened(total), product) if reduced else product
        return wide if result.format is None else scalars.narrowed(wide)

    total = _generic(letters, operands, result, given, start, body)
    if result.format is not None or sums == scalars.element:
        return total
    same, narrow = [Operand(result.letters)], _empty(result, scalars.element, sizes)
    return _generic(result.letters, same, result, [total], narrow, lambda arguments: scalars.narrowed(arguments[0]))


def _generic(
    letters: str,
    operands: Sequence[Operand],
    result: Operand,
    given: Sequence[ir.Value],
    start: ir.Value,
    body: Callable[[list[ir.Value]], ir.Value],
) -> ir.Value:
    """Builds a linalg.generic over the letters. It sums over those that the result lacks."""
    from torch_mlir.dialects import linalg

    maps = ir.ArrayAttr.get([_map(letters, operand.letters) for operand in (*operands, result)])
    kinds = ["parallel" if letter in result.letters else "reduction" for letter in letters]
    iterators = ir.ArrayAttr.get([ir.Attribute.parse(f"#linalg.iterator_type<{kind}>") for kind in kinds])
    op = linalg.GenericOp([start.type], list(given), [start], maps, iterators)
    elements = [ir.RankedTensorType(value.type).element_type for value in (*given, start)]
    block = ir.Block.create_at_start(op.regions[0], elements, [op.location] * len(elements))
    with ir.InsertionPoint(block):
        linalg.YieldOp([body(list(block.arguments))])
    return op.results[0]


def _sizes(operands: Sequence[Operand], given: Sequence[ir.Value]) -> dict[str, ir.Value]:
    """Returns the size of each letter, from dense operands if possible."""
    sizes: dict[str, ir.Value] = {}
    for operand, value in sorted(zip(operands, given, strict=True), key=lambda pair: pair[0].format is not None):
        for axis, letter in enumerate(operand.letters):
            if letter not in sizes:
                sizes[letter] = tensor.dim(value, index(axis))
    return sizes


def _empty(result: Operand, element: ir.Type, sizes: dict[str, ir.Value]) -> ir.Value:
    type_ = _type(result.letters, result.format, element)
    dynamic = [sizes[letter] for letter in result.letters]
    return ir.Operation.create("tensor.empty", results=[type_], operands=dynamic).results[0]


def _map(letters: str, chosen: str) -> ir.AffineMapAttr:
    dims = [ir.AffineDimExpr.get(letters.index(letter)) for letter in chosen]
    return ir.AffineMapAttr.get(ir.AffineMap.get(len(letters), 0, dims))


def _type(letters: str, format: Format | None, element: ir.Type) -> ir.Type:
    encoding = ir.Attribute.parse(str(format)) if format is not None else None
    return ir.RankedTensorType.get([ir.ShapedType.get_dynamic_size()] * len(letters), element, encoding)
