"""Calibrates the machine at the first compilation of a pruned model, once for a machine.

It does not if `GOSSAMER_CALIBRATE=0`, or if there is no cache on disk to keep the result. One process measures; others wait for
it, since they would disturb it. If calibration fails, Gossamer logs the problem and predicts times as for a usual machine.

If a calibration was disturbed, a later process repeats it at its first compilation, when nobody else uses the machine.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gossamer.backend.devices import calibrated
from gossamer.backend.devices.others import quiet_now
from gossamer.backend.graph.inputs import Inputs, density, zero_heavy
from gossamer.dialects.settings import CALIBRATE
from gossamer.runtime import cache_files
from gossamer.runtime.elements import WEIGHTS
from gossamer.runtime.torch_internals import is_traceable_wrapper_subclass

log = logging.getLogger("gossamer")

_LOCK = "calibrating"
_WAIT_S = 60.0
_failed: set[str] = set()
"""Element types whose calibration failed in this process. It does not try them again."""

_asked = False
"""Whether this process need not ask again: its calibration was not in doubt, or it has repeated it."""


def calibrate_at_first_use(inputs: Inputs) -> None:
    """Calibrates this machine for the element types of a graph's pruned weights, if no process has done so yet."""
    if not CALIBRATE.get() or cache_files.directory() is None:
        return
    measured = calibrated.this_machine().measured
    known = measured | _failed
    statics = [static.tensor for static in inputs.statics.values()]
    named = [(WEIGHTS[tensor.dtype], tensor) for tensor in statics if tensor.is_cpu and tensor.dtype in WEIGHTS]
    elements = {name for name, tensor in named if name not in known and _pruned(tensor, inputs)}
    again = _is_to_be_repeated() and any(name in measured and _pruned(tensor, inputs) for name, tensor in named)
    if not elements and not again:
        return
    try:
        with _alone():
            calibrated.forget()  # another process may have done it meanwhile
            done = calibrated.this_machine().measured
            again = again and calibrated.in_doubt()
            if wanted := sorted(elements | done if again else elements - done):
                from gossamer.backend.measuring.calibrate import calibrate  # loads the whole compiler

                start = time.perf_counter()
                calibrate(wanted, repeated=again)
                log.info("this machine was calibrated for %s in %.1f s", ", ".join(wanted), time.perf_counter() - start)
    except Exception as problem:  # the model can be compiled without a calibration
        _failed.update(elements)
        log.warning("this machine cannot be calibrated (%s); times are predicted as for a usual one", problem)


def _is_to_be_repeated() -> bool:
    """Whether the calibration is in doubt and the machine is quiet enough to repeat it. True at most once in a process."""
    global _asked
    if _asked or not calibrated.in_doubt():
        _asked = True
        return False
    _asked = quiet_now()
    return _asked


def _pruned(tensor: torch.Tensor, inputs: Inputs) -> bool:
    """Whether a tensor is a pruned weight: it has many zeros, or is a trained SparseTensor, or a mask of its shape has zeros.

    An int8 weight counts if at least a tenth of it is zeros.
    """
    if tensor.dim() < 2 or tensor.layout is not torch.strided:
        return False
    if is_traceable_wrapper_subclass(tensor):  # these may have no elements to count
        from gossamer.sparsity.tensor.sparse_tensor import SparseTensor  # loads the whole compiler

        return isinstance(tensor, SparseTensor) and tensor.requires_grad
    masks = (s.tensor for s in inputs.statics.values() if s.tensor.dtype == torch.bool and s.tensor.shape == tensor.shape)
    quantized = tensor.dtype is torch.int8 and density(tensor) <= 0.9
    return quantized or zero_heavy(tensor) or any(density(mask) <= 0.9 for mask in masks)


@contextmanager
def _alone() -> Iterator[None]:
    """Holds a lock so that no other process of this user calibrates.

    Raises TimeoutError if another process holds it for a minute, OSError if the file of the lock cannot be opened.
    """
    base = cache_files.directory()
    assert base is not None
    file = os.open(base / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("another process has been at it for a minute") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(file)
