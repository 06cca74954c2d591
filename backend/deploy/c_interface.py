"""Writes the C header of a model, and the C code behind it that checks inputs and holds constants."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from gossamer.backend.deploy.c_code import TYPES, Arrays, in_c
from gossamer.dialects.errors import CompileError

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
            place, expression = f"in[{number}].sizes[{d}]", _expression(size)
            first = self._first(expression)
            if isinstance(expression, sympy.Symbol) and first == (number, d):
                low, high = self.ranges.get(expression, (0, float("inf")))
                most = f" || {place} > {int(high)}" if high < 1 << 62 else ""
                yield f'  if ({place} < {int(low)}{most}) return "{what}, with {size} from {low} to {high}";'
                continue
            symbols = {s: self._first(s) for s in getattr(expression, "free_symbols", ())}
            if None not in symbols.values():
                named = {
                    s: sympy.Symbol(f"in[{at[0]}].sizes[{at[1]}]", integer=True, positive=True)
                    for s, at in symbols.items()
                    if at
                }
                wanted = expression.subs(named) if symbols else expression
                yield f'  if ({place} != {in_c(wanted)}) return "{what}";'

    def _first(self, symbol: Any) -> tuple[int, int] | None:
        """Returns the first input and dimension whose size is this symbol, else None."""
        places = (
            (n, d)
            for n, each in enumerate(self.inputs)
            for d, size in enumerate(each.value.shape)
            if _expression(size) == symbol
        )
        return next(places, None)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _constant(name: str, value: torch.Tensor, arrays: Arrays) -> str:
    value = value.detach().contiguous()
    if value.dtype not in TYPES or value.dim() > _RANK:
        raise CompileError(f"C has no constant like {name}, {value.dtype} with {value.dim()} dimensions")
    sizes, strides = (f"{{{', '.join(map(str, each)) or 0}}}" for each in (value.shape, value.stride()))
    return f'  {{"{name}", {arrays.name(value)}, {TYPES[value.dtype]}, {value.dim()}, {sizes}, {strides}}},'
