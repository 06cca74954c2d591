"""Returns the kernel for a request: one of this process, one from the disk, or a new one."""

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
    """Returns a kernel for tensors on a device. With a dump, compiles it once even if the disk has it, to write its stages.

    kind, name  the kind and name of the object that the kernel computes, for messages and dumps
    request     a text of all that the kernel depends on
    place       the device
    contract    makes its contract IR; not called if the kernel is known
    shown       makes the Python code that the lines of the contract IR come from, for dumps

    Raises CompileError.
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
    """Returns the format of a kernel's packed weight. Raises CompileError if the kernel reads a dense weight."""
    format = next((f for f in kernel.formats if f is not None), None)
    if format is None:
        raise CompileError("the kernel of a region reads the weight densely")
    return format
