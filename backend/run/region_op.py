"""Defines `gossamer::region`, the opaque operation that stands for a region in the rewritten graph.

    gossamer::region([x [T, K], *statics, *extras], key) -> [T, M]
    gossamer::chain([...], key) -> [[T, M], [T, N], ...]                one or more regions with several results

statics  the leaves of the weight's expression (see graph/weight_expressions.py)
extras   the other tensors that the epilogue reads
key      the content hash under which this process knows the region (see compiled_region.py)

All tensors are in one list, and torch.library.Library defines the operations instead of custom_op. Both save time at every
call, because the dispatcher converts each argument.
"""

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import fx

from gossamer.backend.devices.device_kernel import Kernel
from gossamer.backend.run.compiled_region import CompiledRegion
from gossamer.backend.run.fused_optimizers import count_writes
from gossamer.backend.run.labels import label
from gossamer.backend.run.lifetime import share
from gossamer.dialects.errors import CompileError
from gossamer.runtime import int8_product  # noqa: F401  # defines an operation that regions from the disk call
from gossamer.runtime.operations import Operation


class Callee(Protocol):
    """The object that a key stands for: a `CompiledRegion`, or an object that combines several."""

    @property
    def kernels(self) -> tuple[Kernel, ...]: ...

    def __call__(self, operands: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]: ...

    def outputs(self, operands: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns the sizes and type of each result."""
        ...


_regions: WeakValueDictionary[str, Callee] = WeakValueDictionary()
_references: dict[str, Callable[[], Callee | None]] = _regions.data  # type: ignore[attr-defined]  # faster look-ups


def find(key: str) -> Callee | None:
    """Returns the region with this content hash, or None if this process does not know it."""
    return _regions.get(key)


def known(key: str) -> Callee:
    """Returns the region with this content hash. Raises CompileError if this process does not know it."""
    region = _regions.get(key)
    if region is None:
        raise _unknown(key)
    return region


def add(key: str, region: Callee) -> Callee:
    """Registers a region under its content hash, unless one is registered already. Returns the registered region.

    The table holds it by a weak reference. Keep the returned object as long as a graph calls it."""
    return share(_regions, key, region)


def used_in(graph: fx.Graph) -> dict[str, Callee]:
    """Returns the regions that a graph calls, by their keys."""
    return {str(node.args[1]): known(str(node.args[1])) for node in graph.nodes if node.target in (region, chain)}


def takes_images(graph: fx.Graph) -> bool:
    """Whether a region in the graph reads images [N, C, H, W]."""
    calls = (node for node in graph.nodes if node.target in (region, chain))
    return any(call.args[0][0].meta["val"].dim() == 4 for call in calls)


def on_cpu(operands: list[torch.Tensor], key: str) -> torch.Tensor | list[torch.Tensor]:
    """Runs the region of this key."""
    reference = _references.get(key)
    region = reference and reference()  # as `known`, but without the cost of a call
    if region is None:
        raise _unknown(key)
    return region(operands)


def on_cuda(operands: list[torch.Tensor], key: str) -> torch.Tensor | list[torch.Tensor]:
    """Runs the region of this key. While a CUDA graph is captured, a region of a training graph runs dense, so that replays
    read the weight of that time."""
    region = _regions.get(key)
    if isinstance(region, CompiledRegion) and region.training and torch.cuda.is_current_stream_capturing():
        return region.dense(operands)
    return on_cpu(operands, key)


def _label(operands: list[torch.Tensor], key: str) -> str:
    return label(find(key), operands)


def _fake(operands: list[torch.Tensor], key: str) -> torch.Tensor:
    ((shape, dtype),) = known(key).outputs(operands)
    return operands[0].new_empty(shape, dtype=dtype)


def _fake_chain(operands: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    return [operands[0].new_empty(shape, dtype=dtype) for shape, dtype in known(key).outputs(operands)]


def _unknown(key: str) -> CompileError:
    return CompileError(
        f"region {key} was compiled by another process; a graph with sparse regions runs only where it was compiled "
        "(call torch.compile again in this process)"
    )


region = Operation("region(Tensor[] operands, str key) -> Tensor", on_cpu, on_cuda, _fake, label=_label).register()
chain = Operation("chain(Tensor[] operands, str key) -> Tensor[]", on_cpu, fake=_fake_chain, label=_label).register()
count_writes()
