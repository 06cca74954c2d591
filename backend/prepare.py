"""Region → something that runs: import to contract IR, compile, pack the weight. Equal regions are done once.

Two regions are equal where their bodies, types, options and rounded densities are; the values and positions of their
weights are arguments of the kernel and do not count.
"""

import hashlib
import threading
from dataclasses import dataclass

import torch

from gossamer.backend import region_op
from gossamer.backend.cost import densest_that_pays, renewing_pays, schedules
from gossamer.backend.dump import Dump
from gossamer.backend.importer import WEIGHT, import_region
from gossamer.backend.options import Options
from gossamer.backend.packings import Packings
from gossamer.backend.region_op import CompiledRegion, Variant
from gossamer.backend.regions import Region
from gossamer.dialects.errors import CompileError, FormatError
from gossamer.dialects.format import Format
from gossamer.passes.cost_model import UNKNOWN_TOKENS
from gossamer.sparsity.kernels import RegionKernel, compile_region

_lock = threading.RLock()
_kernels: dict[str, RegionKernel] = {}
_packings: dict[tuple[str, str], Packings] = {}


@dataclass(frozen=True)
class Prepared:
    """A region under its key, and the kernels that run it."""

    key: str
    kernels: tuple[RegionKernel, ...]

    @property
    def format(self) -> str:
        """What the weight is packed in, by its name in the field."""
        return ", ".join(_format(kernel).name for kernel in self.kernels)

    @property
    def schedule(self) -> str:
        """The schedules of the kernels; of several, each call picks one by its number of tokens."""
        return ", ".join(kernel.schedule for kernel in self.kernels)


def prepare(region: Region, name: str, leaves: list[torch.Tensor], options: Options, dump: Dump | None) -> Prepared:
    """Compiles the region, packs its weight from the values of `leaves`, and makes it known to `gossamer::region`.

    `name` is the weight's, for messages and dumps. Raises CompileError.
    """
    contraction = region.contraction
    weight = contraction.weight
    density, tokens = _rounded_density(weight.density), _rounded_tokens(contraction.tokens)
    densest = densest_that_pays(contraction, options.min_gain)
    with _lock:
        variants, keys = [], []
        for most_tokens, schedule in schedules(contraction, options.schedule):
            kernel_key = _hash(_signature(region), density, tokens, schedule)
            kernel = _kernels.get(kernel_key)
            if kernel is None or (dump is not None and kernel_key not in dump.written):
                kernel = _kernels[kernel_key] = _compile(region, name, density, tokens, schedule, dump)
            if dump is not None:
                dump.written.add(kernel_key)
            format = _format(kernel)
            packings = _packings.setdefault((weight.key, str(format)), Packings(weight.evaluate, format))
            variants.append(Variant(most_tokens, kernel, packings))
            keys.append(f"{kernel_key} {most_tokens} {format}")
        renew = renewing_pays(contraction, options.min_gain)
        key = _hash(*keys, weight.key, densest, renew, options.verify)
        if region_op.find(key) is None:
            out = region.body.graph.output_node().args[0].meta["val"]  # type: ignore[union-attr]
            compiled = CompiledRegion(
                tuple(variants), region.body, len(leaves), densest, renew, options.verify == "full", contraction.m, out.dtype
            )
            region_op.add(key, compiled)
    # With several variants the first call that needs one packs for it.
    usual = next(v for v in variants if (contraction.tokens or UNKNOWN_TOKENS) <= v.most_tokens)
    try:
        usual.packings.current(leaves, densest)
    except FormatError as error:
        raise CompileError(f"region {name}: its weight cannot be packed: {error}") from error
    return Prepared(key, tuple(v.kernel for v in variants))


def _format(kernel: RegionKernel) -> Format:
    format = kernel.formats[WEIGHT]
    if format is None:
        raise CompileError("the kernel of a region reads the weight densely")
    return format


def _compile(region: Region, name: str, density: float, tokens: int | None, schedule: str, dump: Dump | None) -> RegionKernel:
    stages = dump.stages(name) if dump is not None else None
    if stages is not None:
        stages("fx", "py", region.body.code.strip() + "\n")
    try:
        contract = import_region(region.body, density, tokens)
        if stages is not None:
            stages("contract", "mlir", contract)
        return compile_region(contract, schedule=schedule, observer=stages)
    except CompileError as error:
        where = f"; the stages before are in {dump.directory}" if dump is not None else ""
        raise CompileError(f"region {name}: {error}{where}") from error


def _signature(region: Region) -> str:
    """The body and the types of its arguments; rows are dynamic in every region."""
    arguments = [n.meta["val"] for n in region.body.graph.nodes if n.op == "placeholder"]
    sizes = [[s if isinstance(s, int) else "?" for s in a.shape] for a in arguments]
    return f"{region.body.code}{sizes}{[a.dtype for a in arguments]}"


def _rounded_density(density: float) -> float:
    return max(0.01, round(round(density * 20) / 20, 2))


def _rounded_tokens(tokens: int | None) -> int | None:
    """The next power of two, so that one kernel serves similar batches."""
    return None if tokens is None else 1 << max(0, tokens - 1).bit_length()


def _hash(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:24]
