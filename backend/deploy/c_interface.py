"""Writes the C header of a model, and the C code behind it that checks inputs and holds constants."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import inf

import sympy  # type: ignore[import-untyped]
import torch

from gossamer.backend.deploy.c_code import TYPES, Arrays
from gossamer.dialects.errors import CompileError
from gossamer.runtime.packages.open_sizes import OpenSize

_RANK = 8


@dataclass(frozen=True)
class Named:
    """An input or a result of a model: its name, and a fake tensor with its type and its sizes, which may be symbols."""

    name: str
    value: torch.Tensor


@dataclass(frozen=True)
class Interface:
    """The inputs and results of a library. `ranges` has the least and the largest size for each symbol."""

    name: str
    inputs: Sequence[Named]
    outputs: Sequence[Named]
    ranges: Mapping[sympy.Symbol, tuple[int, float]]

    def header(self) -> str:
        """Returns the text of the header."""
        lines = [f"     {each}" for each in self._described()]
        text = self._text("library.h").replace("SIGNATURE", "\n".join(lines).lstrip())
        return text.replace("INPUT_COUNT", str(len(self.inputs))).replace("OUTPUT_COUNT", str(len(self.outputs)))

    def code(self, constants: Mapping[str, torch.Tensor], arrays: Arrays) -> str:
        """Returns the functions of the header, for a model with these constants. Adds the constants to `arrays`."""
        table = [_constant(name, value, arrays) for name, value in constants.items()]
        declared = [f"extern HIDDEN const char {name}[];" for name in arrays.content]
        checks = [line for number, each in enumerate(self.inputs) for line in self._checks(number, each)]
        return "\n".join([
            self.header(),
            self._text("library.c"),
            *declared,
            "static const struct constant CONSTANTS[] = {", *table, "  {0}};",
            f"static const char *problem(const {self.name}_tensor *in) {{", *checks, "  return NULL;", "}", "",
        ])  # fmt: skip

    def _text(self, file: str) -> str:
        return (files(__package__) / file).read_text().replace("MODEL", self.name)

    def _described(self) -> Iterator[str]:
        for array, tensors in (("in", self.inputs), ("out", self.outputs)):
            for number, each in enumerate(tensors):
                sizes = ", ".join(map(str, each.value.shape))
                yield f"{array}[{number}]  {each.name}: {str(each.value.dtype).removeprefix('torch.')} [{sizes}]"

    def _checks(self, number: int, given: Named) -> Iterator[str]:
        shape, dtype = given.value.shape, given.value.dtype
        if dtype not in TYPES or len(shape) > _RANK:
            raise CompileError(f"C has no input like {given.name}, {dtype} with {len(shape)} dimensions")
        what = f"in[{number}], {given.name}, is no {str(dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"
        yield f'  if (in[{number}].type != {TYPES[dtype]} || in[{number}].rank != {len(shape)}) return "{what}";'
        for d, size in enumerate(shape):
            place = f"in[{number}].sizes[{d}]"
            if isinstance(size, int):
                yield f'  if ({place} != {size}) return "{what}";'
                continue
            found = OpenSize.of(size)
            first, solved = self._first(found.symbol)
            value = f"(({first} - {solved.offset}) / {solved.factor})"
            if place != first:
                yield f'  if ({place} != {found.factor} * {value} + {found.offset}) return "{what}";'
                continue
            low, high = self.ranges.get(found.symbol, (0, inf))
            most = f" || {value} > {int(high)}" if high < 1 << 62 else ""
            rest = f" || ({place} - {found.offset}) % {found.factor}" if found.factor > 1 else ""
            yield f'  if ({value} < {int(low)}{most}{rest}) return "{what}, with {found.symbol} from {low} to {high}";'

    def _first(self, symbol: sympy.Expr) -> tuple[str, OpenSize]:
        """Returns the first size that depends on this symbol, as C and as a multiple of the symbol."""
        return next(
            (f"in[{number}].sizes[{d}]", found)
            for number, each in enumerate(self.inputs)
            for d, size in enumerate(each.value.shape)
            if isinstance(size, torch.SymInt) and (found := OpenSize.of(size)).symbol == symbol
        )


def _constant(name: str, value: torch.Tensor, arrays: Arrays) -> str:
    value = value.detach()
    if value.dtype not in TYPES or value.dim() > _RANK:
        raise CompileError(f"C has no constant like {name}, {value.dtype} with {value.dim()} dimensions")
    sizes, strides = (f"{{{', '.join(map(str, each)) or 0}}}" for each in (value.shape, value.stride()))
    elements = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    held = value.as_strided((elements if value.numel() else 0,), (1,))  # Inductor's code has the strides of the value
    return f'  {{"{name}", {arrays.name(held)}, {TYPES[value.dtype]}, {value.dim()}, {sizes}, {strides}}},'
