"""Region → something that runs: import to contract IR, compile, pack the weight. Equal regions are done once.

Two regions are equal where their bodies, types, options and rounded patterns are; the values and positions of their
weights are arguments of the kernel and do not count.
"""

import hashlib
import threading
from dataclasses import dataclass

import torch
from torch import fx

from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.device_kernel import Kernel
from gossamer.backend.graph.inputs import noticed
from gossamer.backend.graph.nodes import in_training
from gossamer.backend.regions.compiled_kernel import compiled_kernel, format_of
from gossamer.backend.regions.cost import densest_that_pays, matrix_of, renewing_pays, schedules
from gossamer.backend.regions.details import array_names
from gossamer.backend.regions.grow_region import Region
from gossamer.backend.regions.matrix_functions import signature, with_narrow_product
from gossamer.backend.report.dump import Dump
from gossamer.backend.report.options import Options
from gossamer.backend.run import region_op
from gossamer.backend.run.compiled_region import CompiledRegion, Variant, Weight
from gossamer.backend.run.labels import about
from gossamer.backend.run.layouts import Matrices
from gossamer.backend.run.packed_weights import Packings
from gossamer.backend.run.region_op import Callee
from gossamer.dialects.errors import CompileError, FormatError
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.cost_model import UNKNOWN_TOKENS
from gossamer.runtime.packing import Packed

_lock = threading.RLock()

Arrays = tuple[tuple[str, int], ...]
"""Names and bytes."""


@dataclass(frozen=True)
class Built:
    """A region under its key, the kernels that run it, and each weight as packed for the usual tokens.

    packed_bytes  of each weight, 0 for one that is not packed
    arrays        names and bytes of the arrays of each weight
    stages        the region that the dump has for the kernel; empty without a dump
    """

    key: str
    region: Callee
    kernels: tuple[Kernel, ...]
    packed_bytes: tuple[int, ...]
    arrays: tuple[Arrays, ...]
    stages: str = ""

    @property
    def format(self) -> str:
        """What the weight is packed in, by its name in the field."""
        return ", ".join(format_of(kernel).name for kernel in self.kernels)

    @property
    def schedule(self) -> str:
        """The schedules of the kernels; of several, each call picks one by its number of tokens."""
        return ", ".join(kernel.schedule for kernel in self.kernels)


def build_region(region: Region, name: str, leaves: list[torch.Tensor], options: Options, dump: Dump | None) -> Built:
    """Compiles the region, packs its weight from the values of `leaves`, and makes it known to `gossamer::region`.

    `name` is the weight's, for messages and dumps. Raises CompileError.
    """
    contraction = region.contraction
    weight = contraction.weight
    matrix = matrix_of(contraction)
    densest, renew = densest_that_pays(contraction, options.min_gain), renewing_pays(contraction, options.min_gain)
    training, verify = in_training(contraction.node.graph), noticed(weight.leaves, options.verify)
    with _lock:
        variants, keys, requests = [], [], list[str]()
        for most_tokens, schedule in schedules(contraction, options.schedule):
            request, kernel = _kernel(region, name, matrix, schedule, dump)
            format = format_of(kernel)
            packings = Packings.of(weight.key, weight.evaluate, format)
            own = Weight(packings, slice(1, 1 + len(leaves)), densest, renew, verify == "full")
            variants.append(Variant(most_tokens, kernel, (own,)))
            requests.append(request)
            keys.append(f"{content_hash(request)} {most_tokens} {format}")
        key = content_hash(*keys, weight.key, densest, renew, verify, training)
        built = region_op.find(key)
        if built is None:
            result = contraction.m, region.output.meta["val"].dtype
            layout = Matrices((result,) * (1 + (region.second is not None)))
            body = with_narrow_product(region.body) if contraction.quantized else region.body
            said = about("backward" * contraction.op.endswith("backward"), region.members, [contraction.node])
            built = CompiledRegion(tuple(variants), layout, body, device_of(weight.device).allocate, training, about=said)
        built = region_op.add(key, built)
    # With several variants the first call that needs one packs for it.
    at = next(n for n, v in enumerate(variants) if (contraction.tokens or UNKNOWN_TOKENS) <= v.most_tokens)
    usual = variants[at]
    try:
        packed = usual.weights[0].packings.first(leaves, densest)
    except FormatError as error:
        raise CompileError(f"region {name}: its weight cannot be packed: {error}") from error
    stages = "" if dump is None else dump.written.get(requests[at], "")
    size = packed.nbytes if packed is not None else 0
    return Built(key, built, tuple(v.kernel for v in variants), (size,), (arrays_of(packed),), stages)


def arrays_of(packed: Packed | None) -> Arrays:
    """The arrays of a packed weight, by their names; none if it is not packed."""
    if packed is None:
        return ()
    names = array_names(packed.format, len(packed.components))
    return tuple((name, array.nbytes) for name, array in zip(names, packed.components, strict=True))


def _kernel(region: Region, name: str, matrix: Matrix, schedule: str, dump: Dump | None) -> tuple[str, Kernel]:
    """What is asked for, and the kernel."""
    device, tokens = region.contraction.weight.device, rounded_tokens(region.contraction.tokens)
    request = "\n".join(map(str, (device_of(device).target, signature(region.body), matrix, tokens, schedule)))

    def contract() -> str:
        from gossamer.backend.regions.importer import import_region  # torch-mlir's front end takes half a second to load

        return import_region(region.body, matrix, tokens)

    return request, compiled_kernel("region", name, request, schedule, device, contract, dump, lambda: code_of(region.body))


def code_of(body: fx.GraphModule) -> str:
    """A body as text."""
    return body.code.strip() + "\n"


def rounded_tokens(tokens: int | None) -> int | None:
    """The next power of two, so that one kernel serves similar batches."""
    return None if tokens is None else 1 << max(0, tokens - 1).bit_length()


def content_hash(*parts: object) -> str:
    """A hash of the texts of its arguments."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:24]
