"""Keeps rewritten graphs on disk for later processes. Torch keeps its own code, and this cache keeps the regions that it calls.

If AOTAutograd's cache has a graph, torch neither traces it nor calls our rewriting. The key of that cache depends neither on
the values of parameters nor on our decisions. So a `fingerprint` of all that our decisions depend on becomes part of it, as
the `uuid` of our pass. This cache stores the result of the rewriting under the same fingerprint: the regions by their keys,
and the decisions for the report. A fingerprint that misses something costs only speed: a region notices if a weight is not the
one that it was compiled for.

Measurements may be in doubt: other processes disturbed them, or the time was too short. Such decisions are not stored. The
next process compiles the graph again, under another fingerprint, because torch has stored its part under the first. After
`_MOST_TRIES` times the decisions are stored in any case. A later process decides again when nobody disturbs it.
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

_DIGITS = 32  # of a fingerprint
_TRIES, _MOST_TRIES, _MOST_AGAIN = "graphs-to-decide-anew", 4, 8  # a file of fingerprints, and limits for a graph's entries


@dataclass(frozen=True)
class Rewritten:
    """The result of rewriting a graph.

    regions     the regions, by the keys under which `gossamer::region` finds them while somebody keeps them alive
    structures  edge lists, masks, and values computed only from them, likewise by their keys
    modules     Python modules that define the operations in the graph; nobody else imports them if the graph is from a cache
    decisions   the decisions, for the report
    kernels     the keys of the kernels that the regions call
    seconds     the time that each graph pass took
    lasting     whether another process would get the same result
    training    whether the graph has gradients
    impurity    why the graph must not be computed twice (see `purity`); None if it may be
    tried       whether a `Trial` has decided about its convolutions
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
    tried: bool = False


def version() -> str:
    """Returns the version of the code that rewrites graphs. Other versions call operations by other names, so caches must
    not mix their graphs."""
    return f"{compiler()} {source_hash('gossamer.backend', 'gossamer.sparsity')}"


def fingerprint(inputs: Inputs, options: Options, sparse: bool | None = None) -> str | None:
    """Returns a hash of all that decisions about a graph depend on, or None if its regions cannot be kept on disk.

    sparse  what a `Trial` decides about convolutions; None without a trial
    """
    weights = weights_here(inputs)
    if weights is None or options.dump_ir:
        return None
    found = hashlib.sha256(f"{weights}\n{asdict(options)}\n{sparse}\n{inputs.module.code}".encode())
    for value in inputs.values:
        found.update(f"{_described(value)}\n".encode())
    found.update(f"{[_open_sizes(node) for node in inputs.module.graph.find_nodes(op='placeholder')]}".encode())
    base = found.hexdigest()[:_DIGITS]
    return f"{base}-{tries}" if (tries := records.lines(_TRIES).count(base)) else base


def weights_here(inputs: Inputs) -> str | None:
    """Returns a hash of the machine and of the zeros of weights. Returns None if regions cannot be kept on disk."""
    tensors = [static.tensor for static in inputs.statics.values()]
    kept = all(keeps_kernels(tensor.device) for tensor in tensors)
    if off(CACHE) or cache_files.directory() is None or not kept:
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
    found.update(f"{state}\n".encode())
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            found.update(_described(tensor).encode())
        elif tensor.dim() > 1:
            found.update(np.packbits(nonzero_mask(tensor).numpy()).tobytes())
    return found.hexdigest()[:_DIGITS]


def try_again(fingerprint: str) -> None:
    """Makes the next process decide again about a graph."""
    records.append(_TRIES, fingerprint[:_DIGITS])


def is_last_try(fingerprint: str) -> bool:
    """Whether the decisions about a graph are now stored even if they are in doubt."""
    return records.lines(_TRIES).count(fingerprint[:_DIGITS]) >= _MOST_TRIES


def doubt(fingerprint: str) -> None:
    """Notes that the stored decisions about a graph are in doubt."""
    records.append(_TRIES, _doubtful(fingerprint))


def is_to_be_decided_again(fingerprint: str) -> bool:
    """Whether the stored decisions about a graph are in doubt, and no other process disturbs measurements now."""
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
    """Returns which sizes of the arrays of a wrapper subclass are symbolic. Torch's own key does not contain that."""
    given: Any = placeholder.meta.get("example_value")
    if not is_traceable_wrapper_subclass(given):
        return []
    arrays = [getattr(given, name) for name in given.__tensor_flatten__()[0]]
    return [isinstance(size, torch.SymInt) for array in arrays for size in array.shape]


def remember(fingerprint: str, rewritten: Rewritten) -> None:
    """Stores the result of a rewriting."""
    try:
        disk_cache.write(_key(fingerprint), disk_cache.Entry(pickle.dumps(rewritten), {}))
    except Exception as problem:  # pickling may raise anything; this process has compiled the regions and can use them
        log.info("graph cache: regions cannot be stored (%s), another process compiles the graph again", problem)


def recall(fingerprint: str) -> Rewritten | None:
    """Returns the result of rewriting a graph that torch has found in its cache. If the result is None, compile the graph
    again: the entry is missing or damaged."""
    entry = disk_cache.read(_key(fingerprint))
    if entry is None:
        return None
    try:
        found: Rewritten = pickle.loads(entry.code)  # signed with this user's key
    except Exception as problem:  # unpickling may raise anything
        log.info("graph cache: regions cannot be restored (%s), the graph is compiled again", problem)
        return None
    return found


def restore(found: Rewritten) -> list[object]:
    """Registers the regions and structures that such a graph calls, and records the decisions about it.

    Keep the returned objects as long as the graph: they are registered by weak references."""
    for module in found.modules:
        import_module(module)
    called: list[object] = [region_op.add(key, region) for key, region in found.regions.items()]
    called += [structure.shared(key) for key, structure in found.structures.items()]
    record(found.decisions, found.kernels, {}, found.training)
    return called


def _key(fingerprint: str) -> str:
    return f"graph-{fingerprint}"
