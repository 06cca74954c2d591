"""The calls of regions as C: each region becomes a function of tensors that finds its kernel and the words that it takes.

    if (n <= 16) {
      int64_t words[] = {x, n, array_3, 4096, …, y, n, 0, 0, 0};
      return call(kernel_5f21…, words, 11, 8192, 0);
    }

The words come from what calls kernels in Python (see `Kernel.words`), which is given symbols for sizes and addresses.
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
"""torch's numbers of types."""


@dataclass(frozen=True)
class Operand:
    """An operand of a call: how many sizes it has, and those that are the same at every call (None for others)."""

    sizes: tuple[int | None, ...]


@dataclass(frozen=True)
class _Words:
    """A weight as a call takes it."""

    words: Sequence[Any]
    shape: tuple[int, ...]


class Arrays:
    """The arrays of packed weights by the names that C has for them; equal ones have the same."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self._names: dict[bytes, str] = {}

    def name(self, array: torch.Tensor) -> str:
        """The name of an array."""
        held = content(array)
        if held not in self._names:
            self._names[held] = f"array_{len(self._names)}"
            self.content[self._names[held]] = held
        return self._names[held]

    def words(self, packed: Packed) -> _Words:
        """Address and length of each array of a weight."""
        words = [word for array in packed.components for word in (_symbol(self.name(array)), array.numel())]
        return _Words(words, packed.shape)


def kernel_name(key: str) -> str:
    """What C calls a kernel."""
    return f"kernel_{key}"


def region_function(region: ExportedRegion, operands: Sequence[Operand], arrays: Arrays) -> str:
    """The function that runs a region, called `run_KEY`. CompileError for images whose sizes are open."""
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
    """A number or an expression of symbols, which are C. Sums and products alone: C divides integers as Python does not."""
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
