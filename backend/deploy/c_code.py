"""Writes the calls of regions as C: a function for each region, which chooses a kernel and fills in its words.

    if (n <= 16) {
      int64_t words[] = {x, n, array_3, 4096, …, y, n, 0, 0, 0};
      return call(kernel_5f21…, words, 11, 8192, 0);
    }

The words come from the same code as in Python (`Kernel.words`). Here it gets symbols in place of sizes and addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from gossamer.backend.deploy.exported_region import ExportedRegion, Way, content
from gossamer.backend.run.layouts import Images, Sequences
from gossamer.dialects.errors import CompileError
from gossamer.runtime.compiled_kernel import Memory
from gossamer.runtime.packing import Packed

TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
"""torch's numbers for types."""


@dataclass(frozen=True)
class Operand:
    """An operand of a call: its sizes, with None for those that may differ between calls."""

    sizes: tuple[int | None, ...]


@dataclass(frozen=True)
class _Words:
    """A weight in a call: its words as symbols, and its shape."""

    words: Sequence[Any]
    shape: tuple[int, ...]


class Arrays:
    """The arrays of packed weights, by their names in C. Equal arrays share a name."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self._names: dict[bytes, str] = {}

    def name(self, array: torch.Tensor) -> str:
        """Returns the name of an array, and adds the array if it is new."""
        held = content(array)
        if held not in self._names:
            self._names[held] = f"array_{len(self._names)}"
            self.content[self._names[held]] = held
        return self._names[held]

    def words(self, packed: Packed) -> _Words:
        """Returns address and length of each array of a weight."""
        words = [word for array in packed.components for word in (_symbol(self.name(array)), array.numel())]
        return _Words(words, packed.shape)


def kernel_name(key: str) -> str:
    """Returns the name of a kernel in C."""
    return f"kernel_{key}"


def region_function(region: ExportedRegion, operands: Sequence[Operand], arrays: Arrays) -> str:
    """Returns the C function that runs a region, `run_KEY`. Raises CompileError for images with open sizes."""
    given = [_given(number, operand) for number, operand in enumerate(operands)]
    x = given[0]
    if isinstance(region.layout, Images) and any(not isinstance(size, int) for size in x.shape[1:]):
        raise CompileError("images of open sizes cannot be exported: give channels, height and width fixed sizes")
    results = region.layout.outputs(x.shape)
    outputs = [Memory(_symbol(f"(int64_t)out[{number}].data"), shape) for number, (shape, _) in enumerate(results)]
    lines = [f"static int run_{region.key}(const struct tensor *in, struct tensor *out, allocator allocate) {{"]
    for number, (shape, dtype) in enumerate(results):
        lines.append(f"  out[{number}].type = {TYPES[dtype]}, out[{number}].rank = {len(shape)};")
        lines += [f"  out[{number}].sizes[{d}] = {in_c(size)};" for d, size in enumerate(shape)]
    lines.append(f"  if (allocate(out, {len(results)})) return 1;")
    lines.append(f"  if (!({in_c(sympy.prod(results[0][0]))})) return 0;")
    tokens = region.layout.tokens(x.shape)
    for way in region.ways:
        call = _call(region, way, given, outputs, arrays)
        lines += call if way.most_tokens == inf else [f"  if ({in_c(tokens)} <= {int(way.most_tokens)}) {{", *call, "  }"]
    return "\n".join([*lines, "}"])


def _call(region: ExportedRegion, way: Way, given: Sequence[Memory], outputs: Sequence[Memory], arrays: Arrays) -> list[str]:
    x, *others = given
    operands: list[Any] = [x, *(arrays.words(packed) for packed in way.weights), *others]
    out: Any = outputs[0] if len(outputs) == 1 else list(outputs)
    view = region.layout.view(x.shape)
    if view is not None:
        operands, out, *_ = view(operands, out)
    words = [in_c(word) for word in way.kernel.words(operands, out)]
    tokens, shared, scratch = way.kernel.tiles or (1, 0, 0)
    rows = outputs[0].shape[0]
    length = x.shape[not region.layout.by_position] if isinstance(region.layout, Sequences) else rows
    tiles = f"(({in_c(length)} + {tokens - 1}) / {tokens})" if way.kernel.tiles else "0"
    sequences = f"({in_c(rows)} / {in_c(length)})"
    return [
        f"  int64_t words[] = {{{', '.join(words)}, 0, 0, 0}};",
        f"  return call({kernel_name(way.kernel.key)}, words, {len(words) + 3}, {way.kernel.workspace} + {scratch} * {tiles}, "
        f"{shared and f'{sequences} * {tiles} * {shared}'});",
    ]


def _given(number: int, operand: Operand) -> Memory:
    sizes = [_symbol(f"in[{number}].sizes[{d}]") if size is None else size for d, size in enumerate(operand.sizes)]
    return Memory(_symbol(f"(int64_t)in[{number}].data"), tuple(sizes))


def _symbol(text: str) -> Any:
    return sympy.Symbol(text, integer=True, positive=True)


def in_c(value: Any) -> str:
    """Returns a number, or an expression of symbols, as C. Only sums and products, because C and Python divide integers
    differently.

    Raises CompileError for other expressions.
    """
    if isinstance(value, int):
        return f"{value}LL"
    if isinstance(value, sympy.Symbol | sympy.Integer):
        return f"(int64_t){value}" if str(value).startswith("array_") else str(value)
    if isinstance(value, sympy.Mul | sympy.Add):
        sign = " * " if isinstance(value, sympy.Mul) else " + "
        return f"({sign.join(map(in_c, value.args))})"
    if isinstance(value, sympy.Pow) and value.exp.is_Integer and value.exp > 0:
        return f"({' * '.join([in_c(value.base)] * int(value.exp))})"
    raise CompileError(f"the size {value} has no expression in C")
