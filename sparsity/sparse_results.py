"""The operations with sparse results: how many entries they have is known when they have run.

    gossamer::einsum_sparse(arrays, sizes, spec) -> Tensor[]    products of sparse operands
    gossamer::add_sparse(arrays, sizes, spec) -> Tensor[]       the union of two
    gossamer::convert(arrays, sizes, spec) -> Tensor[]          the same tensor in another format, with all that is stored
    gossamer::compress(arrays, sizes, spec) -> Tensor[]         the same without the zeros that fill up blocks
    gossamer::pick(arrays, sizes, spec) -> Tensor               the values of the first operand at the entries of the second

The arrays of a result are its components. `pick` is what the others' gradients need, and its own: what flows to a value is
what flows to the same place of the other pattern.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from gossamer.dialects.format import Format
from gossamer.runtime.operations import LIBRARY, TAGS, implement
from gossamer.sparsity import contract_ir, entries, entry_products
from gossamer.sparsity.contract_ir import Operand
from gossamer.sparsity.dense_results import densified, gradients, sample
from gossamer.sparsity.given_memory import COPIED, GIVER, Block, array_of, given
from gossamer.sparsity.launch import Build, kernel_of, launch
from gossamer.sparsity.loop_order import level_letters, sparse_result_order, unblocked, walkable
from gossamer.sparsity.operands import ARGUMENTS, Bound, Spec, bind, extents, flat
from gossamer.sparsity.row_form import sorted_by_rows, stored_by_rows
from gossamer.sparsity.sparse_product import countable, sparse_product
from gossamer.sparsity.structure import INTEGERS, check_count, check_sizes


def einsum_sparse(operands: Sequence[Bound], result: Operand) -> Bound:
    """The einsum of sparse operands, in the format of `result`; operands that cannot be walked for it are converted first."""
    spec = Spec(tuple(operand.operand for operand in operands), result)
    if sparse_product(spec, operands[0].values.dtype) is None:
        operands = conforming(operands, sparse_result_order(spec.operands, result))
    return _result(torch.ops.gossamer.einsum_sparse.default, operands, result)


def add_sparse(left: Bound, right: Bound, result: Operand) -> Bound:
    """left + right"""
    return _result(torch.ops.gossamer.add_sparse.default, conforming([left, right], level_letters(result)), result)


def in_format(make: Callable[[Operand], Bound], letters: str, format: Format) -> Bound:
    """What `make` gives in a format, which may be one that kernels cannot write: then it is converted."""
    plain = Operand(letters, unblocked(format, len(letters)))
    if plain.format == format:
        return make(plain)
    with sizes_stay_inside():
        made = make(plain)
    return compress(made, format)


def convert(operand: Bound, format: Format) -> Bound:
    """The same tensor in another format with all that is stored, zeros too."""
    return _result(torch.ops.gossamer.convert.default, [operand], Operand(operand.letters, format))


def compress(operand: Bound, format: Format) -> Bound:
    """The same tensor in another format, without the zeros that were stored to fill up blocks or groups."""
    return _result(torch.ops.gossamer.compress.default, [operand], Operand(operand.letters, format))


def pick(source: Bound, pattern: Bound) -> Tensor:
    """The values of `source` at the entries of `pattern` (flat), 0 where it stores none."""
    out: Tensor = torch.ops.gossamer.pick.default(*flat([source, pattern], Operand("p")))
    return out


def conforming(operands: Sequence[Bound], order: Sequence[str]) -> list[Bound]:
    """The operands, in formats that can be walked together in this order of the letters.

    None of several has blocks: MLIR goes over the blocks of one operand only.
    """
    found = []
    for each in operands:
        if each.format is not None:
            plain = unblocked(each.format, len(each.letters))
            format = walkable(Operand(each.letters, plain), order)
            with sizes_stay_inside():
                each = each if each.format == format else convert(each, format)
        found.append(each)
    return found


@contextmanager
def sizes_stay_inside() -> Iterator[None]:
    """While Dynamo asks what a function gives that it does not look into, sizes that stay inside are not its concern."""
    mode = detect_fake_mode()
    if mode is None or mode.shape_env is None or get_proxy_mode() is not None:
        yield
    else:
        with mode.shape_env.ignore_fresh_unbacked_symbols():
            yield


def _result(operation: Callable[..., list[Tensor]], operands: Sequence[Bound], result: Operand) -> Bound:
    sizes = extents(operands)
    return Bound(result, tuple(operation(*flat(operands, result))), tuple(sizes[letter] for letter in result.letters))


# How they run


def _einsum_ir(spec: Spec, dtype: torch.dtype) -> str:
    return contract_ir.einsum(spec.operands, spec.result, dtype)


def _add_ir(spec: Spec, dtype: torch.dtype) -> str:
    left, right = spec.operands
    return contract_ir.add(left, right, spec.result, dtype)


def _kernel_of_product(dtype: torch.dtype, spec: Spec) -> Callable[[Any, Tensor], None]:
    return kernel_of(_einsum_ir, spec, dtype)


def _compiled(build: Build) -> Callable[..., list[Tensor]]:
    """The operation that a kernel of ours computes."""

    def run(arrays: list[Tensor], sizes: list[int], text: str) -> list[Tensor]:
        spec, dtype = Spec.parse(text), arrays[-1].dtype
        format = spec.result.format
        assert format is not None
        operands = bind(arrays, sizes, spec)
        extent = extents(operands)
        check_sizes(format, [extent[letter] for letter in spec.result.letters])
        product = sparse_product(spec, dtype) if build is _einsum_ir else None
        if product is not None and product.hypersparse(operands):
            return entry_products.einsum_sparse(arrays, sizes, text)
        written = format if product is None else countable(format)
        components = format.components()
        results = torch.full([2 * len(components)], GIVER)
        with given() as blocks:
            if product is not None:
                product.run(partial(_kernel_of_product, dtype), operands, written, results)
            else:
                launch(build, operands, spec, results)
        made = _arrays(results, _types(written, dtype), blocks)
        for number, kind in components:
            if kind == "positions":
                check_count(format, format.levels[number], made[-1].numel())
        made = [array.to(type_) for array, type_ in zip(made, _types(format, dtype), strict=True)]
        return [_interleaved(format, *each) for each in zip(components, made, strict=True)]

    return run


def _types(format: Format, dtype: torch.dtype) -> list[torch.dtype]:
    """The types of the arrays of a format with values of a type."""
    widths = {"positions": format.pos_width, "coordinates": format.crd_width}
    return [INTEGERS[widths[kind]] if kind in widths else dtype for _, kind in format.components()]


def _interleaved(format: Format, component: tuple[int, str], array: Tensor) -> Tensor:
    """Coordinates of singletons that share one array are [entries, levels]."""
    count = _sharing(format, component[0]) if component[1] == "coordinates" else 1
    return array.view(-1, count) if count > 1 else array


def _sharing(format: Format, number: int) -> int:
    """How many levels keep their coordinates in the array of this one."""
    count = 1
    while number + count < len(format.levels) and format.levels[number + count].kind == "singleton":
        if format.levels[number + count].soa:
            return 1
        count += 1
    return count


def _arrays(results: Tensor, types: Sequence[torch.dtype], blocks: dict[int, Block]) -> list[Tensor]:
    """The arrays that a kernel says it has made, in blocks that it was given or has allocated itself."""
    found: list[list[int]] = results.view(-1, 2).tolist()
    if found[0][0] == GIVER:
        raise KeyboardInterrupt  # before what gives memory could take note of it
    return [
        array_of(blocks[at], n, dtype) if at in blocks else _owned(at, n, dtype)
        for (at, n), dtype in zip(found, types, strict=True)
    ]


def _owned(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """An array that a kernel has allocated, maybe with room to spare, which goes back with the tensor's memory."""
    size = count * dtype.itemsize
    if size < COPIED:
        out = torch.empty(count, dtype=dtype)
        ctypes.memmove(out.data_ptr(), address, size)
        _free(address)
        return out
    address = _realloc(address, size)
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _free, address).atexit = False
    return torch.frombuffer(memory, dtype=dtype)


_free, _realloc = ctypes.CDLL(None).free, ctypes.CDLL(None).realloc
_free.argtypes, _free.restype = [ctypes.c_void_p], None
_realloc.argtypes, _realloc.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p


def _convert(fill: bool, arrays: list[Tensor], sizes: list[int], text: str) -> list[Tensor]:
    spec = Spec.parse(text)
    (source,), target = bind(arrays, sizes, spec), spec.result.format
    assert source.format is not None and target is not None
    if source.format.levels == target.levels:
        return _rewidened(source, target)
    if (turned := _turned(source, target)) is not None:
        return [_fresh(array, arrays) for array in turned]
    at, values = entries.coordinates(source.format, source.shape, source.arrays), source.values
    if entries.stores_fill(source.format):
        kept = entries.within(source.shape, at)
        if not fill:
            kept &= values != 0
        at, values = [crd[kept] for crd in at], values[kept]
    return [_fresh(array, arrays) for array in entries.assemble(target, source.shape, at, values)]


def _rewidened(source: Bound, target: Format) -> list[Tensor]:
    """The same arrays with integers of other widths."""
    check_sizes(target, source.shape)
    widths = {"positions": target.pos_width, "coordinates": target.crd_width}
    made = []
    for (number, kind), array in zip(target.components(), source.arrays, strict=True):
        if kind == "positions":
            check_count(target, target.levels[number], source.values.numel())
        wide = entries.as_int64(array) if kind in widths else array
        made.append((wide.to(INTEGERS[widths[kind]]) if kind in widths else wide).clone())
    return made


def _turned(source: Bound, target: Format) -> list[Tensor] | None:
    """CSR or CSC of a matrix whose entries are in order and all different, which one sort by rows or columns will do for."""
    assert source.format is not None
    rows = next((dim for dim in range(2) if stored_by_rows(target, dim)), None)
    plain = all(
        level.kind in ("dense", "compressed") and level.block == 1 and not level.nonunique and not level.nonordered
        for level in source.format.levels
    )
    if rows is None or not plain or entries.stores_fill(source.format):
        return None
    check_sizes(target, source.shape)
    check_count(target, target.levels[1], source.values.numel())
    form = sorted_by_rows(source.format, rows, source.shape, source.arrays)
    positions, coordinates = form.positions.to(INTEGERS[target.pos_width]), form.coordinates.to(INTEGERS[target.crd_width])
    return [positions, coordinates, form.values(source.values)]


def _fresh(array: Tensor, given: Sequence[Tensor]) -> Tensor:
    """Memory that no argument has: an operation may not return its arguments."""
    return array.clone() if any(array.data_ptr() == other.data_ptr() for other in given) else array


def _pick(arrays: list[Tensor], sizes: list[int], text: str) -> Tensor:
    source, pattern = bind(arrays, sizes, Spec.parse(text))
    assert source.format is not None and pattern.format is not None
    at = entries.coordinates(pattern.format, pattern.shape, pattern.arrays)
    found, there = entries.locate(source.format, source.shape, source.arrays, at)
    if not source.values.numel():
        return torch.zeros_like(pattern.values)
    return torch.where(there, source.values.index_select(0, found), 0)


# What tracing sees


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
            sharing = _sharing(format, number)
            made.append(like.new_empty([count, sharing] if sharing > 1 else [count], dtype=INTEGERS[format.crd_width]))
    return [*made, like.new_empty([count])]


def _pick_fake(arrays: list[Tensor], sizes: list[int], text: str) -> Tensor:
    values = arrays[-1]
    return values.new_empty(values.shape)


# How they are differentiated


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    arrays, ctx.sizes, ctx.spec = inputs
    results = list(output) if isinstance(output, list | tuple) else []
    ctx.save_for_backward(*arrays, *results)
    ctx.results = len(results)


def _backward(derivative: Callable[[list[Bound], int, Bound], Tensor]) -> Callable[..., tuple[Any, None, None]]:
    """The backward of an operation from the derivative with respect to operand `at`, given the gradient of the result."""

    def backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, None, None]:
        spec = Spec.parse(ctx.spec)
        saved = list(ctx.saved_tensors)
        operands = bind(saved[: -ctx.results], ctx.sizes, spec)
        sizes = extents(operands)
        shape = tuple(sizes[letter] for letter in spec.result.letters)
        values = grads[-1]
        assert values is not None
        result = Bound(spec.result, (*saved[-ctx.results : -1], values), shape)
        return gradients(ctx, operands, lambda at: derivative(operands, at, result)), None, None

    return backward


def _of_einsum(operands: list[Bound], at: int, grad: Bound) -> Tensor:
    own, others = operands[at], [*operands[:at], *operands[at + 1 :], grad]
    known = {letter for other in others for letter in other.letters}
    if not set(own.letters) <= known or own.format is None:
        return sample(own, [densified(other) for other in others])
    # The whole derivative in a format, of which the entries of the operand are taken.
    whole = einsum_sparse(others, Operand(own.letters, Format.csf(len(own.letters))))
    return pick(whole, own)


def _pick_backward(ctx: Any, grad: Tensor) -> tuple[Any, None, None]:
    source, pattern = bind(ctx.saved_tensors, ctx.sizes, Spec.parse(ctx.spec))
    weighted = pattern.with_values(grad)
    return gradients(ctx, [source, pattern], lambda at: None if at else pick(weighted, source)), None, None


def _at_own_entries(operands: list[Bound], at: int, grad: Bound) -> Tensor:
    return pick(grad, operands[at])


_SPARSE: dict[str, tuple[Callable[..., list[Tensor]], Callable[[list[Bound], int, Bound], Tensor]]] = {
    "einsum_sparse": (_compiled(_einsum_ir), _of_einsum),
    "add_sparse": (_compiled(_add_ir), _at_own_entries),
    "convert": (partial(_convert, True), _at_own_entries),
    "compress": (partial(_convert, False), _at_own_entries),
}

for _name, (_kernel, _derivative) in _SPARSE.items():
    LIBRARY.define(f"{_name}{ARGUMENTS} -> Tensor[]", tags=TAGS)
    implement(_name, _kernel)
    torch.library.register_fake(f"gossamer::{_name}", _sparse_fake, lib=LIBRARY)
    torch.library.register_autograd(f"gossamer::{_name}", _backward(_derivative), setup_context=_setup, lib=LIBRARY)
LIBRARY.define(f"pick{ARGUMENTS} -> Tensor", tags=TAGS)
implement("pick", _pick)
torch.library.register_fake("gossamer::pick", _pick_fake, lib=LIBRARY)
torch.library.register_autograd("gossamer::pick", _pick_backward, setup_context=_setup, lib=LIBRARY)
