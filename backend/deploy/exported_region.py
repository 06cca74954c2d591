"""Defines `gossamer::exported`, the operation that stands for a region in an exported program.

    gossamer::exported([x, *extras], key) -> [[T, M], ...]

Unlike in `gossamer::region`, the weights are fixed: they are packed, and are not operands. In a package of AOTInductor, the
operation calls a C function (see c_code.py). In Python, it runs the same kernel.
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
    """The way to compute a region for up to `most_tokens` tokens: a kernel, and the packed weights that it takes."""

    most_tokens: float
    kernel: RegionKernel
    weights: tuple[Packed, ...]


@dataclass(frozen=True)
class Arranged:
    """Maps the operands and results of a call to those of an operation's kernel.

    results  sizes and type of each result; None stands for the rows of the first operand
    takes    the kernel's operands: numbers of the call's operands, or sizes of arrays without elements
    gives    the kernel's results: numbers of the call's results, or such sizes
    flat     numbers of the operands that the kernel sees as one row
    """

    results: tuple[tuple[tuple[int | None, ...], torch.dtype], ...]
    takes: tuple[int | tuple[int, ...], ...]
    gives: tuple[int | tuple[int, ...], ...]
    flat: tuple[int, ...] = ()

    def tokens(self, given: Shape) -> int:
        """Returns the rows of the first operand."""
        return given[0]

    def outputs(self, given: Shape) -> list[tuple[Shape, torch.dtype]]:
        """Returns sizes and types of the results."""
        return [(tuple(given[0] if size is None else size for size in sizes), dtype) for sizes, dtype in self.results]

    def view(self, given: Shape) -> View:
        """Returns a function from the operands and results of a call to those of the kernel."""

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
    """A region with its weights. `ways` ascend by their number of tokens; the last one takes any number."""

    key: str
    layout: Matrices | Images | Arranged
    ways: tuple[Way, ...]

    @classmethod
    def of(cls, region: object, operands: Sequence[torch.Tensor | None]) -> "tuple[ExportedRegion, slice]":
        """Returns a region with the weights among these operands, and the slice of its other operands.

        Raises CompileError if the region is no single kernel, or a weight is not packed.
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
        """Returns the region that calls find by this key; registers this one if there is none yet."""
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
    """Returns the bytes of an array."""
    return array.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def known(key: str) -> ExportedRegion:
    """Returns the region with this key. Raises CompileError if no program of this process has it."""
    region = _regions.get(key)
    if region is None:
        raise CompileError(
            f"region {key} belongs to a program that is gone, or that another process has exported: keep what gossamer.export "
            "returns, and use a package of AOTInductor to bring it to another process"
        )
    return region


def call(emit: Emitter, region: ExportedRegion, operands: Sequence[fx.Node]) -> fx.Node:
    """Emits a call of a region. The graph keeps the region alive."""
    called = emit(exported, list(operands), region.key)
    called.meta[_OWNED] = region
    return called


def _run(operands: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    return known(key)(operands)


def _fake(operands: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    return [operands[0].new_empty(sizes, dtype=dtype) for sizes, dtype in known(key).layout.outputs(operands[0].shape)]


_OWNED = "gossamer"
"""The key by which the metadata of a call keep its region."""

_regions: WeakValueDictionary[str, ExportedRegion] = WeakValueDictionary()
"""All living regions, by key."""

exported = Operation("exported(Tensor[] operands, str key) -> Tensor[]", _run, fake=_fake, direct=False).register()
