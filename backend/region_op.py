"""`gossamer::region`, the opaque operation that stands for a region in the rewritten graph.

    gossamer::region(x [T, K], statics [...], extras [...], key) -> [T, M]

`statics` are the leaves of the weight's expression, `extras` the other tensors the epilogue reads, `key` is the content
hash under which this process knows the region. The operation is registered with torch.library.Library, which costs less
per call than torch.library.custom_op.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gossamer.backend.kernels import RegionKernel
from gossamer.backend.packings import Packings
from gossamer.backend.weights import run
from gossamer.dialects.errors import CompileError
from gossamer.runtime.packing import Packed


@dataclass(eq=False)
class CompiledRegion:
    """A region that can run, sparse or dense.

    kernel   computes it from (x, packed weight, *extras)
    body     computes it from (x, weight, *extras), densely
    packings the packed weights
    densest  density above which `body` is the faster of the two
    verify   whether every value of the weight is compared on every call
    m, dtype columns and type of the result
    """

    kernel: RegionKernel
    body: Callable[..., torch.Tensor]
    packings: Packings
    densest: float
    verify: bool
    m: int
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor, statics: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]) -> torch.Tensor:
        out = torch.empty((x.size(0), self.m), dtype=self.dtype)
        if out.numel() == 0:
            return out
        packings = self.packings
        packed = (packings.verified if self.verify else packings.current)(statics, self.densest)
        if packed is None:
            return self._dense(x, statics, extras)
        operands: list[torch.Tensor | Packed] = [x if x.is_contiguous() else x.contiguous(), packed]
        operands += [extra if extra.is_contiguous() else extra.contiguous() for extra in extras]
        self.kernel(operands, out)
        return out

    def _dense(self, x: torch.Tensor, statics: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return self.body(x, run(self.packings.evaluate, statics), *extras).contiguous()


_regions: dict[str, CompiledRegion] = {}


def find(key: str) -> CompiledRegion | None:
    """The region of this content hash, if this process has compiled it."""
    return _regions.get(key)


def add(key: str, region: CompiledRegion) -> None:
    """Makes a region known under its content hash."""
    _regions[key] = region


def _on_cpu(x: torch.Tensor, statics: Sequence[torch.Tensor], extras: Sequence[torch.Tensor], key: str) -> torch.Tensor:
    region = _regions.get(key)
    if region is None:
        raise _unknown(key)
    return region(x, statics, extras)


def _on_meta(x: torch.Tensor, statics: Sequence[torch.Tensor], extras: Sequence[torch.Tensor], key: str) -> torch.Tensor:
    region = _regions.get(key)
    if region is None:
        raise _unknown(key)
    return x.new_empty((x.shape[0], region.m), dtype=region.dtype)


def _unknown(key: str) -> CompileError:
    return CompileError(
        f"region {key} was compiled by another process; a graph with sparse regions runs only where it was compiled "
        "(call torch.compile again in this process)"
    )


_library = torch.library.Library("gossamer", "FRAGMENT")
_library.define("region(Tensor x, Tensor[] statics, Tensor[] extras, str key) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("region", _on_cpu, "CPU")
_library.impl("region", _on_meta, "Meta")

region = torch.ops.gossamer.region.default
