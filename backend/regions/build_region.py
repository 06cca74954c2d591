"""Makes a region executable: imports it to contract IR, compiles it, and packs its weight. Equal regions share all of that.

Two regions share kernels if their bodies, types, options and rounded patterns are equal. The values and positions of their
weights are arguments of the kernel.
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
"""The name and the bytes of each array."""


@dataclass(frozen=True)
class Built:
    """A compiled region, and its weights as packed for the usual number of tokens.

    key           the key under which `gossamer::region` finds the region
    kernels       the kernels that run it
    packed_bytes  bytes of each packed weight, 0 for one that is not packed
    arrays        names and bytes of the arrays of each weight
    stages        the name under which the dump has the kernel's stages; empty without a dump
    """

    key: str
    region: Callee
    kernels: tuple[Kernel, ...]
    packed_bytes: tuple[int, ...]
    arrays: tuple[Arrays, ...]
    stages: str = ""

    @property
    def format(self) -> str:
        """The usual names of the formats that the weight is packed in."""
        return ", ".join(format_of(kernel).name for kernel in self.kernels)

    @property
    def schedule(self) -> str:
        """The schedules of the kernels. If there are several, each call chooses one by its number of tokens."""
        return ", ".join(kernel.schedule for kernel in self.kernels)


def build_region(region: Region, name: str, leaves: list[torch.Tensor], options: Options, dump: Dump | None) -> Built:
    """Compiles a region, packs its weight, and registers it for `gossamer::region`.

    name    the name of the weight, for messages and dumps
    leaves  the values that the weight is computed from

    Raises CompileError.
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
    # The weight is packed now for one variant. For the others, the first call that needs one packs it.
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
    """Returns the names and bytes of a packed weight's arrays, or none if it is not packed."""
    if packed is None:
        return ()
    names = array_names(packed.format, len(packed.components))
    return tuple((name, array.nbytes) for name, array in zip(names, packed.components, strict=True))


def _kernel(region: Region, name: str, matrix: Matrix, schedule: str, dump: Dump | None) -> tuple[str, Kernel]:
    """Returns the request, a text of all that the kernel depends on, and the kernel."""
    device, tokens = region.contraction.weight.device, rounded_tokens(region.contraction.tokens)
    request = "\n".join(map(str, (device_of(device).target, signature(region.body), matrix, tokens, schedule)))

    def contract() -> str:
        from gossamer.backend.regions.importer import import_region  # torch-mlir's front end takes half a second to load

        return import_region(region.body, matrix, tokens)

    return request, compiled_kernel("region", name, request, schedule, device, contract, dump, lambda: code_of(region.body))


def code_of(body: fx.GraphModule) -> str:
    """Returns the Python code of a body."""
    return body.code.strip() + "\n"


def rounded_tokens(tokens: int | None) -> int | None:
    """Returns the next power of two, so that similar batches share a kernel."""
    return None if tokens is None else 1 << max(0, tokens - 1).bit_length()


def content_hash(*parts: object) -> str:
    """Returns a hash of the texts of its arguments."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:24]
