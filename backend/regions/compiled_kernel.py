"""The kernel that a request asks for: of this process, from the disk, or new."""

from collections.abc import Callable
from weakref import WeakValueDictionary

import torch

from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.device_kernel import Kernel
from gossamer.backend.report.dump import Dump
from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing
from gossamer.runtime.versions import source_hash

_kernels: WeakValueDictionary[str, Kernel] = WeakValueDictionary()


def compiled_kernel(
    kind: str, name: str, request: str, schedule: str, place: torch.device, contract: Callable[[], str], dump: Dump | None,
    shown: Callable[[], str] | None = None,
) -> Kernel:  # fmt: skip
    """A kernel for tensors at a place. With a dump, each is compiled once for its stages.

    kind, name  what it is of, for messages and dumps
    request     all that it depends on
    contract    makes its contract IR; it is not called for a kernel that is known
    shown       makes the text whose lines are the origins of that, for dumps

    CompileError if it cannot be compiled.
    """
    known, device = _kernels.get(request) if dump is None or request in dump.written else None, device_of(place)
    if known is None:
        full = f"{request}\n{source_hash('gossamer.backend')}"
        stages = None if dump is None else dump.stages(name)
        known = device.recall(full) if stages is None else None
        if stages is not None and shown is not None:
            stages("fx", "py", shown())
        try:
            if known is None:
                text = contract()
                if stages is not None:
                    stages("contract", "mlir", text)
                known = device.compile(text, schedule, stages, full)
        except CompileError as error:
            where = "" if dump is None else f"; the stages before are in {dump.directory}"
            raise CompileError(f"{kind} {name}: {error}{where}") from error
    if dump is not None:
        dump.written.setdefault(request, name)
    _kernels[request] = known
    return known


def format_of(kernel: Kernel) -> Format | Packing:
    """What the weight of a kernel is packed in. CompileError if it is read densely."""
    format = next((f for f in kernel.formats if f is not None), None)
    if format is None:
        raise CompileError("the kernel of a region reads the weight densely")
    return format
