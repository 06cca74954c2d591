"""Runs the operations with sparse results (see `sparse_results`) on CPUs."""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.sparsity.arrays import stored_entries
from gossamer.sparsity.arrays.row_form import sorted_by_rows, stored_by_rows
from gossamer.sparsity.arrays.structure import INTEGERS, check_count, check_sizes, sharing
from gossamer.sparsity.compiler import contract_ir
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.kernel_memory import COPIED, GIVER, Block, Interrupted, array_of, given
from gossamer.sparsity.compiler.operands import Bound, Spec, bind, extents
from gossamer.sparsity.operations import entry_products
from gossamer.sparsity.operations.calls import Build, call_of, kernel_of, launch
from gossamer.sparsity.operations.sparse_product import countable, sparse_product


def _einsum_ir(spec: Spec, dtype: torch.dtype) -> str:
    return contract_ir.einsum(spec.operands, spec.result, dtype)


def _add_ir(spec: Spec, dtype: torch.dtype) -> str:
    left, right = spec.operands
    return contract_ir.add(left, right, spec.result, dtype)


def _kernel_of_product(dtype: torch.dtype, spec: Spec) -> Callable[[Any, Tensor], None]:
    return kernel_of(_einsum_ir, spec, dtype)


def _no_row_product(spec: Spec) -> None:
    """Returns None, because no call with a sparse result is a product of one matrix with dense ones."""


def _compiled(build: Build) -> Callable[..., list[Tensor]]:
    """Returns the function that computes an operation by the kernel of `build`."""

    def run(arrays: list[Tensor], sizes: list[int], text: str) -> list[Tensor]:
        narrow = arrays[-1].dtype
        if narrow in (torch.float16, torch.bfloat16):  # sums are in f32
            *structure, values = run([array.float() if array.dtype == narrow else array for array in arrays], sizes, text)
            return [*structure, values.to(narrow)]
        arrays = [array.contiguous() for array in arrays]  # the kernel gets the addresses of these arrays
        call = call_of(build, _no_row_product, text, arrays, sizes)
        spec, dtype = call.spec, call.dtype
        format = spec.result.format
        assert format is not None
        operands = bind(arrays, sizes, spec)
        extent = extents(operands)
        check_sizes(format, [extent[letter] for letter in spec.result.letters])
        product = sparse_product(spec, dtype) if build is _einsum_ir else None
        if product is not None and product.hypersparse(operands):
            return entry_products.einsum_sparse(arrays, sizes, text)
        written = countable(format)  # MLIR reads positions as signed numbers when it inserts
        components = format.components()
        results = torch.full([2 * len(components)], GIVER, device="cpu")
        with given() as blocks:
            if product is not None:
                product.run(partial(_kernel_of_product, dtype), operands, written, results)
            elif not launch(build, operands, _writing(spec, written), results):
                of_entries = entry_products.einsum_sparse if build is _einsum_ir else entry_products.add_sparse
                return of_entries(arrays, sizes, text)
        made = _arrays(results, _types(written, dtype), blocks, arrays)
        for number, kind in components:
            if kind == "positions":
                check_count(format, format.levels[number], made[-1].numel())
        made = [array.to(type_) for array, type_ in zip(made, _types(format, dtype), strict=True)]
        return [_interleaved(format, *each) for each in zip(components, made, strict=True)]

    return run


def _writing(spec: Spec, format: Format) -> Spec:
    return spec if format == spec.result.format else Spec(spec.operands, Operand(spec.result.letters, format))


def _types(format: Format, dtype: torch.dtype) -> list[torch.dtype]:
    """Returns the dtypes of the arrays of a format with values of a dtype."""
    widths = {"positions": format.pos_width, "coordinates": format.crd_width}
    return [INTEGERS[widths[kind]] if kind in widths else dtype for _, kind in format.components()]


def _interleaved(format: Format, component: tuple[int, str], array: Tensor) -> Tensor:
    """Returns an array in its shape. Coordinates of singleton levels that share one array are [entries, levels]."""
    count = sharing(format, component[0]) if component[1] == "coordinates" else 1
    return array.view(-1, count) if count > 1 else array


def _arrays(
    results: Tensor, types: Sequence[torch.dtype], blocks: dict[int, Block], arguments: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Returns the arrays that a kernel has written, in blocks that it was given or has allocated.

    Arrays inside an argument are copied. MLIR returns such arrays if it has nothing to compute.
    """
    found: list[list[int]] = results.view(-1, 2).tolist()
    if found[0][0] == GIVER:
        raise Interrupted("while a kernel asked for memory: its result is lost")
    return [
        array_of(blocks[at], n, dtype) if at in blocks else _owned(at, n, dtype, any(_holds(each, at) for each in arguments))
        for (at, n), dtype in zip(found, types, strict=True)
    ]


def _holds(tensor: Tensor, address: int) -> bool:
    storage = tensor.untyped_storage()
    return storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes()


def _owned(address: int, count: int, dtype: torch.dtype, borrowed: bool) -> Tensor:
    """Returns an array that a kernel has allocated, maybe too large, as a tensor that frees it.

    An array that it has `borrowed` from an argument is copied.
    """
    size = count * dtype.itemsize
    if borrowed or size < COPIED:
        out = torch.empty(count, dtype=dtype, device="cpu")
        ctypes.memmove(out.data_ptr(), address, size)
        if not borrowed:
            _free(address)
        return out
    address = _realloc(address, size)
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _free, address).atexit = False
    return torch.frombuffer(memory, dtype=dtype)


_free, _realloc = ctypes.CDLL(None).free, ctypes.CDLL(None).realloc
_free.argtypes, _free.restype = [ctypes.c_void_p], None
_realloc.argtypes, _realloc.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p


def _converted(fill: bool, arrays: list[Tensor], sizes: list[int], text: str) -> list[Tensor]:
    spec = Spec.parse(text)
    (source,), target = bind(arrays, sizes, spec), spec.result.format
    assert source.format is not None and target is not None
    if source.format.levels == target.levels:
        return _rewidened(source, target)
    if (turned := _turned(source, target)) is not None:
        return [_fresh(array, arrays) for array in turned]
    at, values = stored_entries.coordinates(source.format, source.shape, source.arrays), source.values
    if stored_entries.stores_fill(source.format):
        kept = stored_entries.within(source.shape, at)
        if not fill:
            kept &= values != 0
        at, values = [crd[kept] for crd in at], values[kept]
    return [_fresh(array, arrays) for array in stored_entries.assemble(target, source.shape, at, values)]


def _rewidened(source: Bound, target: Format) -> list[Tensor]:
    """Returns the same arrays with integers of other widths."""
    check_sizes(target, source.shape)
    widths = {"positions": target.pos_width, "coordinates": target.crd_width}
    made = []
    for (number, kind), array in zip(target.components(), source.arrays, strict=True):
        if kind == "positions":
            check_count(target, target.levels[number], source.values.numel())
        wide = stored_entries.as_int64(array) if kind in widths else array
        made.append((wide.to(INTEGERS[widths[kind]]) if kind in widths else wide).clone())
    return made


def _turned(source: Bound, target: Format) -> list[Tensor] | None:
    """Returns CSR or CSC of a matrix with ordered, unique entries, by one sort by rows or columns. None for other cases."""
    assert source.format is not None
    rows = next((dim for dim in range(2) if stored_by_rows(target, dim)), None)
    plain = all(
        level.kind in ("dense", "compressed") and level.block == 1 and not level.nonunique and not level.nonordered
        for level in source.format.levels
    )
    if rows is None or not plain or stored_entries.stores_fill(source.format):
        return None
    check_sizes(target, source.shape)
    check_count(target, target.levels[1], source.values.numel())
    form = sorted_by_rows(source.format, rows, source.shape, source.arrays)
    positions, coordinates = form.positions.to(INTEGERS[target.pos_width]), form.coordinates.to(INTEGERS[target.crd_width])
    return [positions, coordinates, form.values(source.values)]


def _fresh(array: Tensor, given: Sequence[Tensor]) -> Tensor:
    """Returns an array, cloned if it is an argument, because an operation may not return its arguments."""
    return array.clone() if any(array.data_ptr() == other.data_ptr() for other in given) else array


def pick(arrays: list[Tensor], sizes: list[int], text: str) -> Tensor:
    """Computes `gossamer::pick` on all devices."""
    source, pattern = bind(arrays, sizes, Spec.parse(text))
    assert source.format is not None and pattern.format is not None
    at = stored_entries.coordinates(pattern.format, pattern.shape, pattern.arrays)
    found, there = stored_entries.locate(source.format, source.shape, source.arrays, at)
    there &= stored_entries.within(pattern.shape, at)  # padding of blocks has the key of another entry
    if not source.values.numel():
        return torch.zeros_like(pattern.values)
    return source.values.index_select(0, found).masked_fill(~there, 0)


einsum_sparse = _compiled(_einsum_ir)
"""Computes `gossamer::einsum_sparse` for CPU tensors."""
add_sparse = _compiled(_add_ir)
"""Computes `gossamer::add_sparse` for CPU tensors."""
convert = partial(_converted, True)
"""Computes `gossamer::convert` on all devices."""
compress = partial(_converted, False)
"""Computes `gossamer::compress` on all devices."""
