"""Graphs that an earlier process has compiled: torch keeps its own code on disk, and we keep the regions which that calls.

AOTAutograd's cache spares the tracing of a graph, and with it our rewriting. Its key knows neither the values of parameters
nor our decisions, so a `fingerprint` of all that we decide by becomes part of it (the `uuid` of our pass). What the rewriting
came to is stored under the same fingerprint: the regions by their keys, and the decisions for the report. A fingerprint that
misses something costs speed only: a region notices by itself that a weight is not the one it was compiled for.

Decisions by measurements that other processes disturbed, or for which the time was too short, are not stored. The next process
compiles the graph again, and under another fingerprint, because torch has stored its part. After a few times they are stored
in any case, and a later process decides anew when nobody disturbs it.
"""

import hashlib
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import fx

from gossamer.backend.devices.calibrated import this_machine
from gossamer.backend.devices.device_kernel import keeps_kernels
from gossamer.backend.devices.others import quiet_now
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Decision, record
from gossamer.backend.run import region_op
from gossamer.backend.run.region_op import Callee
from gossamer.runtime import cache_files, disk_cache, records
from gossamer.runtime.data_cache import first_level_bytes
from gossamer.runtime.packers.nonzeros import nonzero_mask
from gossamer.runtime.target import host
from gossamer.runtime.torch_internals import is_traceable_wrapper_subclass, off
from gossamer.runtime.torch_names import CACHE
from gossamer.runtime.versions import compiler, source_hash

log = logging.getLogger("gossamer")

_DIGITS = 32
_TRIES, _MOST_TRIES, _MOST_AGAIN = "graphs-to-decide-anew", 4, 8


@dataclass(frozen=True)
class Rewritten:
    """What the rewriting of a graph came to.

    regions     by the keys under which their operation finds them, as long as somebody keeps them
    structures  edge lists, masks, and what depends on them alone, likewise
    modules     those that define the operations in the graph: where it comes from the cache, nobody else imports them
    decisions   for the report, the `kernels` that they led to, and the `seconds` of each graph pass
    lasting     whether it would come to the same in another process
    training    whether the graph has gradients
    impurity    why the graph may be computed once only (see `purity`); None if it may be computed twice
    """

    regions: Mapping[str, Callee]
    structures: Mapping[str, Any]
    modules: Sequence[str]
    decisions: Sequence[Decision]
    kernels: Sequence[str]
    seconds: Mapping[str, float]
    lasting: bool
    training: bool = False
    impurity: str | None = None


def version() -> str:
    """What has rewritten a graph: graphs of another version call operations by other names, so that no cache may mix them."""
    return f"{compiler()} {source_hash('gossamer.backend', 'gossamer.sparsity')}"


def fingerprint(inputs: Inputs, options: Options) -> str | None:
    """A hash of all that decisions about a graph depend on; None where its regions cannot be kept on disk."""
    tensors = [static.tensor for static in inputs.statics.values()]
    kept = all(keeps_kernels(tensor.device) for tensor in tensors)
    if off(CACHE) or cache_files.directory() is None or options.dump_ir or not kept:
        return None
    found = hashlib.sha256(f"{version()}\n{host()}\n".encode())
    state = (
        first_level_bytes(),
        this_machine(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"),
    )
    found.update(f"{asdict(options)}\n{state}\n{inputs.module.code}".encode())
    for value in inputs.values:
        found.update(f"{_described(value)}\n".encode())
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            found.update(_described(tensor).encode())
        elif tensor.dim() > 1:
            found.update(np.packbits(nonzero_mask(tensor).numpy()).tobytes())
    found.update(f"{[_open_sizes(node) for node in inputs.module.graph.find_nodes(op='placeholder')]}".encode())
    base = found.hexdigest()[:_DIGITS]
    return f"{base}-{tries}" if (tries := records.lines(_TRIES).count(base)) else base


def try_again(fingerprint: str) -> None:
    """Has the next process decide anew about a graph."""
    records.append(_TRIES, fingerprint[:_DIGITS])


def is_last_try(fingerprint: str) -> bool:
    """Whether what is decided about a graph now is stored in any case."""
    return records.lines(_TRIES).count(fingerprint[:_DIGITS]) >= _MOST_TRIES


def doubt(fingerprint: str) -> None:
    """Notes that what is stored about a graph was decided while others disturbed."""
    records.append(_TRIES, _doubtful(fingerprint))


def is_to_be_decided_again(fingerprint: str) -> bool:
    """Whether what is stored about a graph was decided while others disturbed, and now nobody does."""
    tries = records.lines(_TRIES)
    return _doubtful(fingerprint) in tries and tries.count(fingerprint[:_DIGITS]) < _MOST_AGAIN and quiet_now()


def _doubtful(fingerprint: str) -> str:
    return f"{fingerprint} in doubt"


def _described(value: Any) -> str:
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        return f"{value.shape} {context} {[_described(getattr(value, name)) for name in names]}"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {[_described(size) for size in value.shape]} {value.requires_grad}"
    return f"{value} {value.node.hint}" if isinstance(value, torch.SymInt) else str(value)


def _open_sizes(placeholder: fx.Node) -> list[bool]:
    """Which sizes of the arrays of a wrapper subclass are open: torch's own key does not tell."""
    given: Any = placeholder.meta.get("example_value")
    if not is_traceable_wrapper_subclass(given):
        return []
    arrays = [getattr(given, name) for name in given.__tensor_flatten__()[0]]
    return [isinstance(size, torch.SymInt) for array in arrays for size in array.shape]


def remember(fingerprint: str, rewritten: Rewritten) -> None:
    """Stores what a rewriting came to."""
    try:
        disk_cache.write(_key(fingerprint), disk_cache.Entry(pickle.dumps(rewritten), {}))
    except Exception as problem:  # whatever pickling may raise: what cannot be stored has been compiled all the same
        log.info("graph cache: regions cannot be stored (%s), another process compiles the graph again", problem)


def recall(fingerprint: str) -> Rewritten | None:
    """The result of rewriting a graph that torch has found in its cache. None if it is not on disk, or not whole: compile the
    graph again."""
    entry = disk_cache.read(_key(fingerprint))
    if entry is None:
        return None
    try:
        found: Rewritten = pickle.loads(entry.code)  # signed with this user's key
    except Exception as problem:  # whatever unpickling may raise
        log.info("graph cache: regions cannot be restored (%s), the graph is compiled again", problem)
        return None
    return found


def restore(found: Rewritten) -> list[object]:
    """Makes what such a graph calls known, as long as the result is kept, and records the decisions about it."""
    for module in found.modules:
        import_module(module)
    called: list[object] = [region_op.add(key, region) for key, region in found.regions.items()]
    called += [structure.shared(key) for key, structure in found.structures.items()]
    record(found.decisions, found.kernels, {}, found.training)
    return called


def _key(fingerprint: str) -> str:
    return f"graph-{fingerprint}"
