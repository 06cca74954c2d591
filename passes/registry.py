"""Passes by name, and pipelines of them: ours and MLIR's, mixed in any order.

    run_pipeline(module, "func.func(linalg-generalize-named-ops),fuse-epilogue,cse,schedule{bits=256}")

A pass of ours is a frozen dataclass whose fields are its options. It runs on the whole module, which is
verified afterwards. Whatever is not the name of one is a piece of MLIR's own pipeline syntax. Importing this
file or listing the names imports no pass and no MLIR.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from gossamer.dialects.errors import OptionError
from gossamer.passes.framework.pass_options import build, choices, label, split

if TYPE_CHECKING:
    from torch_mlir import ir


class Pass(Protocol):
    """What a pass of ours looks like, next to being a frozen dataclass."""

    name: ClassVar[str]

    def run(self, module: "ir.Module") -> None:
        """Rewrite the module in place, its context entered; to fail, raise or `op.location.emit_error`."""


AnyPass = TypeVar("AnyPass", bound=type[Pass])

_PASSES: dict[str, str | type[Pass]] = {
    "propagate-encodings": "gossamer.passes.contract.propagate_encodings:PropagateEncodings",
    "keep-nan": "gossamer.passes.contract.keep_nan:KeepNan",
    "keep-wide": "gossamer.passes.contract.keep_wide:KeepWide",
    "fuse-epilogue": "gossamer.passes.contract.fuse_epilogue:FuseEpilogue",
    "lift-rows": "gossamer.passes.contract.lift_rows:LiftRows",
    "inline-stages": "gossamer.passes.contract.inline_stages:InlineStages",
    "forget-hints": "gossamer.passes.contract.forget_hints:ForgetHints",
    "choose-format": "gossamer.passes.contract.choose_format:ChooseFormat",
    "schedule": "gossamer.passes.contract.schedule:Schedule",
    "gather-rows": "gossamer.passes.contract.gather_rows:GatherRows",
    "expose-storage": "gossamer.passes.finish.expose_storage:ExposeStorage",
    "lower-rows": "gossamer.passes.operands.lower_rows:LowerRows",
    "slice-rows": "gossamer.passes.contract.slice_rows:SliceRows",
    "lower-slices": "gossamer.passes.operands.lower_slices:LowerSlices",
    "lower-reduce-edges": "gossamer.passes.operands.lower_reduce_edges:LowerReduceEdges",
    "lower-segments": "gossamer.passes.operands.lower_segments:LowerSegments",
    "lower-sort-keys": "gossamer.passes.operands.lower_sort_keys:LowerSortKeys",
    "sample-rows": "gossamer.passes.contract.sample_rows:SampleRows",
    "lower-dots": "gossamer.passes.operands.lower_dots:LowerDots",
    "multiply-tall": "gossamer.passes.contract.multiply_tall:MultiplyTall",
    "lower-tall": "gossamer.passes.operands.lower_tall:LowerTall",
    "multiply-rows": "gossamer.passes.contract.multiply_rows:MultiplyRows",
    "lower-gustavson": "gossamer.passes.operands.lower_gustavson:LowerGustavson",
    "lower-sample": "gossamer.passes.operands.lower_sample:LowerSample",
    "lower-attend-edges": "gossamer.passes.operands.lower_attend_edges:LowerAttendEdges",
    "lower-attend-edges-grad": "gossamer.passes.operands.lower_attend_edges_grad:LowerAttendEdgesGrad",
    "lower-chain": "gossamer.passes.chain.lower_chain:LowerChain",
    "lower-kblock": "gossamer.passes.weights.lower_kblock:LowerKblock",
    "lower-block": "gossamer.passes.weights.lower_block:LowerBlock",
    "lower-blockvec": "gossamer.passes.weights.lower_blockvec:LowerBlockvec",
    "lower-rowpairs": "gossamer.passes.weights.lower_rowpairs:LowerRowpairs",
    "lower-gather": "gossamer.passes.weights.lower_gather:LowerGather",
    "lower-lookup": "gossamer.passes.weights.lower_lookup:LowerLookup",
    "lower-planes": "gossamer.passes.weights.lower_planes:LowerPlanes",
    "lower-bitmap": "gossamer.passes.weights.lower_bitmap:LowerBitmap",
    "lower-broadcast": "gossamer.passes.weights.lower_broadcast:LowerBroadcast",
    "expose-specifiers": "gossamer.passes.finish.expose_specifiers:ExposeSpecifiers",
    "lower-gpu-kblock": "gossamer.passes.weights_gpu.lower_gpu_kblock:LowerGpuKblock",
    "lower-amx": "gossamer.passes.weights_bf16.lower_amx:LowerAmx",
    "lower-expand": "gossamer.passes.weights_bf16.lower_expand:LowerExpand",
    "lower-amxcolumns": "gossamer.passes.weights_bf16.lower_amxcolumns:LowerAmxcolumns",
    "lower-amxexpand": "gossamer.passes.weights_bf16.lower_amxexpand:LowerAmxexpand",
    "lower-pairs": "gossamer.passes.weights_bf16.lower_pairs:LowerPairs",
    "lower-bf16dot": "gossamer.passes.weights_bf16.lower_bf16dot:LowerBf16dot",
    "lower-gpu-gather": "gossamer.passes.weights_gpu.lower_gpu_gather:LowerGpuGather",
    "lower-gpu-blocks": "gossamer.passes.weights_gpu.lower_gpu_blocks:LowerGpuBlocks",
    "lower-gpu-vnm": "gossamer.passes.weights_gpu.lower_gpu_vnm:LowerGpuVnm",
    "lower-gpu-expand": "gossamer.passes.weights_gpu.lower_gpu_expand:LowerGpuExpand",
    "lower-gpu-rows": "gossamer.passes.operands.lower_gpu_rows:LowerGpuRows",
    "lower-gpu-segments": "gossamer.passes.operands.lower_gpu_segments:LowerGpuSegments",
    "lower-gpu-dots": "gossamer.passes.operands.lower_gpu_dots:LowerGpuDots",
    "lower-gpu-twofour": "gossamer.passes.weights_gpu.lower_gpu_twofour:LowerGpuTwofour",
    "expand-math": "gossamer.passes.finish.expand_math:ExpandMath",
    "parallelize": "gossamer.passes.finish.parallelize:Parallelize",
    "emit-entry": "gossamer.passes.finish.emit_entry:EmitEntry",
    "lower-to-llvm": "gossamer.passes.finish.lower_to_llvm:LowerToLlvm",
    "emit-gpu-entry": "gossamer.passes.finish.emit_gpu_entry:EmitGpuEntry",
    "lower-to-nvvm": "gossamer.passes.finish.lower_to_nvvm:LowerToNvvm",
}


@dataclass(frozen=True)
class PassInstance:
    """A pass ready to run; `label` is how a pipeline writes it, options included."""

    label: str
    run: "Callable[[ir.Module], None]"


def register(cls: AnyPass) -> AnyPass:
    """Decorator that makes a pass of your own known to pipelines; OptionError if its name is taken."""
    known = _PASSES.get(cls.name)
    if known is not None and _qualified(known) != _qualified(cls):
        raise OptionError(f"there is a pass called '{cls.name}' already: {_qualified(known)}")
    _PASSES[cls.name] = cls
    return cls


def names() -> list[str]:
    """The names of our passes, in the order in which a region meets them."""
    return list(_PASSES)


def get(name: str) -> type[Pass]:
    """The class of one of our passes; OptionError for an unknown name."""
    if name not in _PASSES:
        raise OptionError(f"unknown pass '{name}'{choices(name, _PASSES)}")
    entry = _PASSES[name]
    if isinstance(entry, str):
        module, _, cls = entry.partition(":")
        entry = getattr(import_module(module), cls)
    return entry


def instance(configured: Pass) -> PassInstance:
    """One of our passes, options set, as part of a pipeline."""
    return PassInstance(label(configured), partial(_run_ours, configured))


def parse_pipeline(text: str) -> list[PassInstance]:
    """The passes of `a,b{option=1},func.func(c)`, with or without `builtin.module(…)` around.

    OptionError names a pass, an option or a value that is wrong, and the valid ones.
    """
    whole = re.fullmatch(r"\s*builtin\.module\s*\((.*)\)\s*", text, re.DOTALL)
    if whole and len(split(text, ",")) == 1:
        text = whole[1]
    return [_parse_pass(piece) for piece in split(text, ",")] if text.strip() else []


def run_pipeline(
    module: "ir.Module",
    pipeline: str | Sequence[PassInstance],
    observer: "Callable[[str, ir.Module], None] | None" = None,
) -> None:
    """Run a pipeline on a module, in place; after each pass the observer gets its label and the module.

    PassError (a CompileError) if a pass fails, with its name and diagnostics; OptionError, before anything
    runs, if the text of the pipeline is wrong.
    """
    from gossamer.passes.framework.diagnostics import failures_raised

    for step in parse_pipeline(pipeline) if isinstance(pipeline, str) else pipeline:
        with failures_raised(step.label, module):
            step.run(module)
        if observer is not None:
            observer(step.label, module)


def _parse_pass(piece: str) -> PassInstance:
    ours = re.fullmatch(r"([\w-]+)\s*(?:\{(.*)\})?", piece, re.DOTALL)
    if ours and ours[1] in _PASSES:
        return instance(build(get(ours[1]), ours[2] or ""))
    if not piece:
        raise OptionError("there is nothing between two commas of the pipeline")
    from gossamer.passes.framework import upstream

    try:
        upstream.check(piece)
    except ValueError as error:
        raise OptionError(_explained(piece, str(error))) from None
    return PassInstance(piece, partial(upstream.run, piece))


def _run_ours(configured: Pass, module: "ir.Module") -> None:
    configured.run(module)
    module.operation.verify()


def _explained(piece: str, reason: str) -> str:
    """What is wrong with a piece of a pipeline that MLIR refused, and what to write instead."""
    unknown = re.search(r"'([^']+)' does not refer to a registered pass", reason)
    if unknown and unknown[1] in _PASSES:
        return f"'{unknown[1]}' runs on the whole module: write it at the top level, not inside '{piece}'"
    if unknown:
        return f"unknown pass '{unknown[1]}'{choices(unknown[1], _PASSES)}, and those of MLIR"
    return f"MLIR refuses '{piece}': {' '.join(reason.split())}"


def _qualified(entry: str | type[Pass]) -> str:
    return entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"
