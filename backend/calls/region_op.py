"""`gossamer::region`, the opaque operation that stands for a region in the rewritten graph.

    gossamer::region([x [T, K], *statics, *extras], key) -> [T, M]
    gossamer::chain([...], key) -> [[T, M], [T, N], ...]                the same, or several regions, with several results

`statics` are the leaves of the weight's expression, `extras` the other tensors the epilogue reads, `key` is the content
hash under which this process knows the region. One list, and torch.library.Library instead of custom_op, because every
argument that the dispatcher converts costs on every call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import fx

from gossamer.backend.calls.fused_optimizers import count_writes
from gossamer.backend.calls.lifetime import share
from gossamer.backend.calls.packed_weights import Packings
from gossamer.backend.devices.kernel import Allocate, Kernel
from gossamer.backend.graph.weight_expressions import run
from gossamer.dialects.errors import CompileError
from gossamer.runtime import int8_product  # noqa: F401  # which bodies of regions from the disk call
from gossamer.runtime.operations import Operation
from gossamer.runtime.packing import Packed


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to compute a region, for up to `most_tokens` rows of x: a kernel, and the weights packed for it."""

    most_tokens: float
    kernel: Kernel
    packings: Packings


@dataclass(eq=False)
class CompiledRegion:
    """A region that can run, sparse or dense.

    variants the sparse ways, by ascending number of tokens; the last one takes any number
    body     computes the region from (x, weight, *extras), densely
    leaves   number of tensors that the weight is computed from
    densest  density above which `body` is the faster of the two
    renew    whether sparse is the faster even for a weight that changes at every call
    verify   whether every value of the weight is compared on every call
    m, dtype columns and type of the result
    allocate memory for the result, on the device of the kernels
    training whether the region is of a graph with gradients
    two      whether it has two results, both of this type
    """

    variants: tuple[Variant, ...]
    body: Callable[..., torch.Tensor]
    leaves: int
    densest: float
    renew: bool
    verify: bool
    m: int
    dtype: torch.dtype
    allocate: Allocate
    training: bool
    two: bool = False

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Those of all variants."""
        return tuple(variant.kernel for variant in self.variants)

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Sizes of the result for this first operand."""
        return x.shape[0], self.m

    def outputs(self, operands: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Sizes and types of all results."""
        return [(self.shape(operands[0]), self.dtype)] * (1 + self.two)

    def __call__(self, operands: list[torch.Tensor]) -> Any:
        tokens, m = operands[0].shape[0], self.m  # faster than size(0)
        out: Any = self.allocate((tokens, m), (m, 1), self.dtype)
        if self.two:
            out = [out, self.allocate((tokens, m), (m, 1), self.dtype)]
        return out if tokens == 0 or m == 0 else self.into(operands, out)

    def into(self, operands: list[torch.Tensor], out: Any) -> Any:
        """Computes into `out`, which is not empty, or densely into another tensor; whichever is returned has the result. Of two
        results, lists."""
        # Runs at every call: what would read better in a function, or as a comprehension, costs 0.1 µs more there.
        x, variant, leaves = operands[0], self.variants[0], self.leaves
        if x.shape[0] > variant.most_tokens:
            variant = next(v for v in self.variants if x.shape[0] <= v.most_tokens)
        packings = variant.packings
        look_up = packings.verified if self.verify else packings.current
        packed = look_up(operands[1 : 1 + leaves], self.densest, self.renew)
        if packed is None:
            return self.dense(operands)
        given: list[torch.Tensor | Packed] = [x if x.is_contiguous() else x.contiguous(), packed]
        for extra in operands[1 + leaves :]:
            given.append(extra if extra.is_contiguous() else extra.contiguous())  # noqa: PERF401
        variant.kernel(given, out)
        return out

    def dense(self, operands: Sequence[torch.Tensor]) -> Any:
        """The same in plain torch."""
        x, statics, extras = operands[0], operands[1 : 1 + self.leaves], operands[1 + self.leaves :]
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            found: Any = self.body(x, run(self.variants[0].packings.evaluate, statics), *extras)
        return [each.contiguous() for each in found] if self.two else found.contiguous()


class Callee(Protocol):
    """What a key stands for: a region or a chain of them."""

    @property
    def kernels(self) -> tuple[Kernel, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(self, operands: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]: ...

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Sizes of the result, or of the first of several, by the first operand."""
        ...


_regions: WeakValueDictionary[str, Callee] = WeakValueDictionary()
_references: dict[str, Callable[[], Callee | None]] = _regions.data  # type: ignore[attr-defined]  # quicker to look up


def find(key: str) -> Callee | None:
    """The region of this content hash, if this process has compiled it."""
    return _regions.get(key)


def known(key: str) -> Callee:
    """The region of this content hash. CompileError if this process does not know it."""
    region = _regions.get(key)
    if region is None:
        raise _unknown(key)
    return region


def add(key: str, region: Callee) -> Callee:
    """Makes a region known under its content hash, as long as somebody keeps what is returned: the one that is known now."""
    return share(_regions, key, region)


def used_in(graph: fx.Graph) -> dict[str, Callee]:
    """The regions that the calls in a graph find, by their keys."""
    return {str(node.args[1]): known(str(node.args[1])) for node in graph.nodes if node.target in (region, chain)}


def on_cpu(operands: list[torch.Tensor], key: str) -> torch.Tensor | list[torch.Tensor]:
    """Runs the region of this key."""
    reference = _references.get(key)
    region = reference and reference()  # as `known`, without the call
    if region is None:
        raise _unknown(key)
    return region(operands)


def on_cuda(operands: list[torch.Tensor], key: str) -> torch.Tensor | list[torch.Tensor]:
    """Runs the region of this key; while a CUDA graph is captured, one in training runs dense, so that replays see its weight
    as it is then."""
    region = _regions.get(key)
    if isinstance(region, CompiledRegion) and region.training and torch.cuda.is_current_stream_capturing():
        return region.dense(operands)
    return on_cpu(operands, key)


def _fake(operands: list[torch.Tensor], key: str) -> torch.Tensor:
    region = known(key)
    return operands[0].new_empty(region.shape(operands[0]), dtype=region.dtype)


def _fake_chain(operands: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    several: Any = known(key)
    return [operands[0].new_empty(shape, dtype=dtype) for shape, dtype in several.outputs(operands)]


def _unknown(key: str) -> CompileError:
    return CompileError(
        f"region {key} was compiled by another process; a graph with sparse regions runs only where it was compiled "
        "(call torch.compile again in this process)"
    )


region = Operation("region(Tensor[] operands, str key) -> Tensor", on_cpu, on_cuda, _fake).register()
chain = Operation("chain(Tensor[] operands, str key) -> Tensor[]", on_cpu, fake=_fake_chain).register()
count_writes()
