"""What users add in a few lines: operations, formats, sparsifiers. See docs/extending.md.

What is built in registers its operations here as well.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from gossamer.dialects.errors import GossamerError
from gossamer.dialects.format import Format
from gossamer.sparsity.arrays import stored_entries
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

Function = TypeVar("Function", bound=Callable[..., Any])


def implements(*functions: Callable[..., Any]) -> Callable[[Function], Function]:
    """Registers a function as what these functions of torch do if an argument is a SparseTensor, eager and compiled.

        @gossamer.implements(torch.sinc, torch.Tensor.sinc)
        def sinc(input): ...

    It is called with their arguments. Written in terms of other operations on SparseTensors, `values()` and `with_values()`,
    it is differentiable and traced as they are. The functions may be torch's, and methods such as torch.Tensor.sinc.
    """

    def register(function: Function) -> Function:
        SparseTensor.functions.update(dict.fromkeys(functions, function))
        return function

    return register


def register_format(name: str, levels: str | Format, pack: stored_entries.Pack | None = None) -> Format:
    """A format of your own, made of levels; every operation takes it from then on.

        ELL = gossamer.register_format("ELL", "(i, j) -> (i : dense, j : loose_compressed)", pack=fill_rows)

    name    what `repr` prints
    levels  the map of a #sparse_tensor.encoding, or a whole one, or a Format
    pack    for formats that store more than the nonzeros they are given: pack(format, shape, at, values) gives the entries to
            store, `at` a list of coordinates (int64, one tensor a dimension) and values to match, in any order. It may add
            zeros at coordinates that have no entry, and nothing else. Without it a format stores what it is given.

    What is stored reads as the levels say, so there is no function to unpack. FormatError if MLIR cannot use the levels, or if
    they, or the name, are those of another format.
    """
    if isinstance(levels, str):
        text = levels if levels.lstrip().startswith("#") else f"#sparse_tensor.encoding<{{ map = {levels} }}>"
        levels = Format.parse(text)
    format = levels.registered(name)
    if pack is not None:
        stored_entries.PACKS[format.levels] = pack
    return format


def unsupported(what: str, instead: str) -> GossamerError:
    """The error that says so, and what to do."""
    return GossamerError(f"SparseTensor: {what} is not supported; {instead}")
