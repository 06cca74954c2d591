"""`gossamer::exported`, the operation that stands for a region in an exported program.

    gossamer::exported([x, *extras], key) -> [[T, M], ...]

In contrast to `gossamer::region` its weights are fixed: they are packed, and no operands. In a package of AOTInductor the call
is one of a function in C (see c_code.py); in Python it runs the same kernel.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx

from gossamer.backend.devices.device_kernel import allocate, contiguous_strides
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.run.compiled_region import CompiledRegion
from gossamer.backend.run.layouts import Images, Matrices, Shape, View
from gossamer.dialects.errors import CompileError
from gossamer.runtime.compiled_kernel import Memory
from gossamer.runtime.operations import Operation
from gossamer.runtime.packing import Packed
from gossamer.runtime.region_kernel import RegionKernel


@dataclass(frozen=True, eq=False)
class Way:
    """How a region is computed for up to `most_tokens` tokens: a kernel, and the weights as it takes them."""

    most_tokens: float
    kernel: RegionKernel
    weights: tuple[Packed, ...]


@dataclass(frozen=True)
class Arranged:
    """The operands of an operation's kernel, which may be in another order, and arrays without elements.

    results  sizes and type of each; None is as many as the first operand has rows
    takes    what the kernel is given: numbers of operands, and the sizes of arrays without elements
    gives    what it computes: numbers of results, and such sizes
    flat     the operands that the kernel sees as one row
    """

    results: tuple[tuple[tuple[int | None, ...], torch.dtype], ...]
    takes: tuple[int | tuple[int, ...], ...]
    gives: tuple[int | tuple[int, ...], ...]
    flat: tuple[int, ...] = ()

    def tokens(self, given: Shape) -> int:
        """Rows of the first operand."""
        return given[0]

    def outputs(self, given: Shape) -> list[tuple[Shape, torch.dtype]]:
        """Sizes and types of results."""
        return [(tuple(given[0] if size is None else size for size in sizes), dtype) for sizes, dtype in self.results]

    def view(self, given: Shape) -> View:
        """What the kernel takes."""

        def view(operands: Sequence[Any], out: Any) -> tuple[Any, Any]:
            seen = [
                Memory(each.data_ptr(), (prod(each.shape),)) if number in self.flat else each
                for number, each in enumerate(operands)
            ]
            made = list(out) if isinstance(out, list) else [out]
            taken, given = (
                [Memory(0, each) if isinstance(each, tuple) else there[each] for each in wanted]
                for wanted, there in ((self.takes, seen), (self.gives, made))
            )
            return taken, given if len(given) > 1 else given[0]

        return view


@dataclass(frozen=True, eq=False)
class ExportedRegion:
    """A region with its weights. `ways` are by ascending number of tokens, and the last takes any number."""

    key: str
    layout: Matrices | Images | Arranged
    ways: tuple[Way, ...]

    @classmethod
    def of(cls, region: object, operands: Sequence[torch.Tensor | None]) -> "tuple[ExportedRegion, slice]":
        """A region of these operands, of which its weights are known, and where its other operands are.

        CompileError for one that is no single kernel, or whose weight is not packed.
        """
        if not isinstance(region, CompiledRegion):
            raise CompileError(f"a {type(region).__name__} cannot be exported")
        ways, key = list[Way](), hashlib.sha256(str(region.layout).encode())
        for variant in region.variants:
            assert isinstance(variant.kernel, RegionKernel)
            weights = list[Packed]()
            for weight in variant.weights:
                leaves = [leaf for leaf in operands[weight.statics] if leaf is not None]
                packed = weight.packings.first(leaves, weight.densest)
                if packed is None:
                    raise CompileError(f"a weight of {variant.kernel.schedule} is not packed any more: export the model again")
                weights.append(packed)
            ways.append(Way(variant.most_tokens, variant.kernel, tuple(weights)))
            key.update(f"{variant.most_tokens} {variant.kernel.key}".encode())
            for array in (array for packed in weights for array in packed.components):
                key.update(content(array))
        return cls(key.hexdigest()[:16], region.layout, tuple(ways)).shared(), region.variants[0].others

    def shared(self) -> "ExportedRegion":
        """The one that calls find by its key: this one, where there is none yet."""
        return _regions.setdefault(self.key, self)

    @property
    def results(self) -> int:
        """The number of results."""
        return 1 if isinstance(self.layout, Images) else len(self.layout.results)

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        x, *others = [each.contiguous() for each in operands]
        tokens, view = self.layout.tokens(x.shape), self.layout.view(x.shape)
        way = next(each for each in self.ways if tokens <= each.most_tokens)
        outputs = [allocate(sizes, contiguous_strides(sizes), dtype) for sizes, dtype in self.layout.outputs(x.shape)]
        given, out = [x, *way.weights, *others], outputs[0] if len(outputs) == 1 else outputs
        if outputs[0].numel():
            way.kernel(*((given, out) if view is None else view(given, out)))
        return outputs


def content(array: torch.Tensor) -> bytes:
    """The bytes of an array."""
    return array.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def known(key: str) -> ExportedRegion:
    """The region of a key. CompileError if no program of this process has it."""
    region = _regions.get(key)
    if region is None:
        raise CompileError(
            f"region {key} belongs to a program that is gone, or that another process has exported: keep what gossamer.export "
            "returns, and use a package of AOTInductor to bring it to another process"
        )
    return region


def call(emit: Emitter, region: ExportedRegion, operands: Sequence[fx.Node]) -> fx.Node:
    """A call of a region, in a graph that keeps the region as long as it lives."""
    called = emit(exported, list(operands), region.key)
    called.meta[_OWNED] = region
    return called


def _run(operands: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    return known(key)(operands)


def _fake(operands: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    return [operands[0].new_empty(sizes, dtype=dtype) for sizes, dtype in known(key).layout.outputs(operands[0].shape)]


_OWNED = "gossamer"
"""What the metadata of a call holds its region by."""

_regions: WeakValueDictionary[str, ExportedRegion] = WeakValueDictionary()
"""Those that somebody keeps."""

exported = Operation("exported(Tensor[] operands, str key) -> Tensor[]", _run, fake=_fake, direct=False).register()
