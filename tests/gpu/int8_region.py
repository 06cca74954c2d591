"""Quantized layers as contract IR, and what they compute: exactly, since scales are powers of two."""

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from gossamer.backend.regions.importer import import_region
from gossamer.passes.framework.family import Matrix
from tests.contracts import TYPES

aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Int8Region:
    """relu(sums * step * scale + bias) with x [T, k] and a sparse w of int8, stored as [m, k] or, if `transposed`, as [k, m];
    the sums as floats if it is `bare`. Nonzeros fill aligned blocks of `block` rows and columns."""

    m: int
    k: int
    element: str = "f32"
    bare: bool = False
    transposed: bool = False
    block: tuple[int, int] = (1, 1)

    @property
    def dtype(self) -> torch.dtype:
        return TYPES[self.element]

    def text(self) -> str:
        """The region's contract IR."""
        graph = fx.Graph()

        def given(name: str, dtype: torch.dtype, *shape: int | None) -> fx.Node:
            node = graph.placeholder(name)
            node.meta = {"shape": shape, "dtype": dtype}
            return node

        stored = (self.k, self.m) if self.transposed else (self.m, self.k)
        x, w = given("x", torch.int8, None, self.k), given("w", torch.int8, *stored)
        shapes = {} if self.bare else {"step": (None, 1), "scale": (self.m,), "bias": (self.m,)}
        extras = [given(name, torch.float32, *shape) for name, shape in shapes.items()]
        wide = [graph.call_function(convert, (node, torch.int32)) for node in (x, w)]
        factor = wide[1] if self.transposed else graph.call_function(aten.permute.default, (wide[1], [1, 0]))
        y = graph.call_function(convert, (graph.call_function(aten.mm.default, (wide[0], factor)), torch.float32))
        if not self.bare:
            for step in (aten.mul.Tensor, aten.mul.Tensor, aten.add.Tensor):
                y = graph.call_function(step, (y, extras.pop(0)))
            y = graph.call_function(aten.relu.default, (y,))
        graph.output(y if self.element == "f32" else graph.call_function(convert, (y, self.dtype)))
        block = self.block if self.block != (1, 1) else None
        matrix = Matrix(self.m, self.k, 0 if self.transposed else 1, "i8", 1024, block=block)
        return import_region(fx.GraphModule({}, graph, "Layer"), matrix, None)

    def operands(self, tokens: int, density: float = 0.3) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Extreme values among others, w as it is stored, and the extra operands."""
        x, w = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((tokens, self.k), (self.m, self.k)))
        for each in (x, w):
            each[torch.rand(each.shape) < 0.2] = -128
        rows, columns = self.block
        kept = torch.rand(-(-self.m // rows), -(-self.k // columns)) < density
        w *= kept.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: self.m, : self.k]
        powers = (2.0 ** torch.randint(-12, -6, shape) for shape in ((tokens, 1), (self.m,)))
        extras = [] if self.bare else [*powers, torch.randint(-64, 64, (self.m,)) / 8]
        return x, (w.t() if self.transposed else w).contiguous(), extras

    def reference(self, x: Tensor, w: Tensor, extras: list[Tensor]) -> Tensor:
        """What the region computes, rounded once."""
        sums = (x.long() @ (w if self.transposed else w.t()).long()).double()
        if not self.bare:
            step, scale, bias = (each.double() for each in extras)
            sums = torch.relu(sums * step * scale + bias)
        return sums.to(self.dtype)
