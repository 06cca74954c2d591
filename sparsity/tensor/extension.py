"""Decorators by which users add operations and formats in a few lines. See docs/extending.md.

Gossamer's own operations use them, too.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from gossamer.dialects.errors import GossamerError
from gossamer.dialects.format import Format
from gossamer.sparsity.arrays import stored_entries
from gossamer.sparsity.arrays.structure import check_levels
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

Function = TypeVar("Function", bound=Callable[..., Any])


def implements(*functions: Callable[..., Any]) -> Callable[[Function], Function]:
    """Decorator that makes a function the implementation of torch functions for SparseTensors, eager and compiled.

        @gossamer.implements(torch.sinc, torch.Tensor.sinc)
        def sinc(input): ...

    It gets the arguments of the torch function, or of a method such as torch.Tensor.sinc. If it uses other operations on
    SparseTensors, `values()` and `with_values()`, it has gradients and torch.compile traces it.
    """

    def register(function: Function) -> Function:
        SparseTensor.functions.update(dict.fromkeys(functions, function))
        return function

    return register


def register_format(name: str, levels: str | Format, pack: stored_entries.Pack | None = None) -> Format:
    """Defines a storage format by its levels, and returns it. All operations then take it.

        ELL = gossamer.register_format("ELL", "(i, j) -> (i : dense, j : loose_compressed)", pack=fill_rows)

    name    what `repr` prints
    levels  the map of a #sparse_tensor.encoding, a whole encoding, or a Format
    pack    only for formats that store more than the nonzeros: pack(format, shape, at, values) returns the entries to store, in
            any order. `at` is a list of coordinates (int64, one tensor for each dimension). It may add zeros at coordinates
            that have no entry, and nothing else

    No function for unpacking is needed, because the levels say how to read the arrays. FormatError if MLIR or a SparseTensor
    cannot use the levels, or if another format has these levels or this name.
    """
    if isinstance(levels, str):
        text = levels if levels.lstrip().startswith("#") else f"#sparse_tensor.encoding<{{ map = {levels} }}>"
        levels = Format.parse(text)
    check_levels(levels)
    format = levels.registered(name)
    if pack is not None:
        stored_entries.PACKS[format.levels] = pack
    return format


def unsupported(what: str, instead: str) -> GossamerError:
    """Returns the error for an unsupported operation. It says what to do instead."""
    return GossamerError(f"SparseTensor: {what} is not supported; {instead}")
