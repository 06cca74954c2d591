"""Calibration by itself: once for a machine, at the first compilation of a pruned model.

Not where `GOSSAMER_CALIBRATE=0`, nor where there is no cache to keep the result in. One process measures; those that come
meanwhile wait for it, since they would disturb it. What goes wrong is logged, and the machine counts as a usual one.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gossamer.backend.devices import calibrated
from gossamer.backend.graph.inputs import Inputs, density, zero_heavy
from gossamer.dialects.settings import CALIBRATE
from gossamer.runtime import cache_files
from gossamer.runtime.elements import WEIGHTS
from gossamer.runtime.torch_internals import is_traceable_wrapper_subclass

log = logging.getLogger("gossamer")

_LOCK = "calibrating"
_WAIT_S = 60.0
_failed: set[str] = set()
"""Element types whose calibration has failed in this process, which does not try again."""


def calibrate_at_first_use(inputs: Inputs) -> None:
    """Measures how fast this machine is with the element types of a graph's pruned weights, if nobody has done so yet."""
    if not CALIBRATE.get() or cache_files.directory() is None:
        return
    known = calibrated.this_machine().measured | _failed
    statics = [static.tensor for static in inputs.statics.values()]
    named = [(WEIGHTS[tensor.dtype], tensor) for tensor in statics if tensor.is_cpu and tensor.dtype in WEIGHTS]
    elements = {name for name, tensor in named if name not in known and _pruned(tensor, inputs)}
    if not elements:
        return
    try:
        with _alone():
            calibrated.forget()  # another process may have done it meanwhile
            if missing := sorted(elements - calibrated.this_machine().measured):
                from gossamer.backend.measuring.calibrate import calibrate  # with all of the compiler behind it

                start = time.perf_counter()
                calibrate(missing)
                log.info("this machine was calibrated for %s in %.1f s", ", ".join(missing), time.perf_counter() - start)
    except Exception as problem:  # whatever it is, the model can be compiled without
        _failed.update(elements)
        log.warning("this machine cannot be calibrated (%s); times are predicted as for a usual one", problem)


def _pruned(tensor: torch.Tensor, inputs: Inputs) -> bool:
    """Whether a tensor has zeros, or stores nonzeros to train, or is a matrix in a graph with masks, which may give it some."""
    if tensor.dim() < 2 or tensor.layout is not torch.strided:
        return False
    if is_traceable_wrapper_subclass(tensor):  # which may have no elements to look at
        from gossamer.sparsity.tensor.sparse_tensor import SparseTensor  # with all of the compiler behind it

        return isinstance(tensor, SparseTensor) and tensor.requires_grad
    masks = (s.tensor for s in inputs.statics.values() if s.tensor.dtype == torch.bool and s.tensor.shape == tensor.shape)
    quantized = tensor.dtype is torch.int8 and density(tensor) <= 0.9
    return quantized or zero_heavy(tensor) or any(density(mask) <= 0.9 for mask in masks)


@contextmanager
def _alone() -> Iterator[None]:
    """In here no other process of this user calibrates. TimeoutError if one does for long, OSError if there can be no lock."""
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
