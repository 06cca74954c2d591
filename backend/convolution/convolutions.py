"""convolutions: those with a static weight that is mostly zeros, with what follows them, as sparse kernels.

%y = convolution(%x, %w, %bias, ...)         →    %z = gossamer::region([%x, %w, %bias], "3f2a…")
%z = relu(%y)
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.calls import region_op
from gossamer.backend.calls.convolved_region import ConvolvedRegion, on_images
from gossamer.backend.calls.depthwise_region import DepthwiseRegion
from gossamer.backend.calls.packed_weights import Packings
from gossamer.backend.convolution.convolution import Convolution, Judgement, find, gain_of
from gossamer.backend.convolution.planar import together
from gossamer.backend.devices.kernel import Kernel
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import density, zero_heavy
from gossamer.backend.regions.build_region import content_hash
from gossamer.backend.regions.contractions import in_training
from gossamer.backend.regions.cost import matrix_of
from gossamer.backend.regions.decide import refusal
from gossamer.backend.regions.grow_region import Region, grow
from gossamer.backend.regions.matrix_functions import signature
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import FAILED, Decision
from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.runtime.region_kernel import recall_region
from gossamer.runtime.torch_internals import inductor_config
from gossamer.runtime.versions import source_hash

aten = torch.ops.aten

_SCHEDULE = "convolve"
_TYPES = (torch.float32, torch.float64)


class Convolutions:
    """Convolutions with a sparse weight become regions."""

    name: ClassVar[str] = "convolutions"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """A decision for each convolution whose weight has zeros, and for those between them that are depthwise."""
        statics, options = context.inputs.match(graph), context.options
        values = {node: static.tensor for node, static in statics.items()}
        decisions, claimed = list[Decision](), set[fx.Node]()
        failures = list[CompileError]()
        judged = list[Judgement]()
        for node, found in find(graph, values):
            if not isinstance(found, str):
                judged.append(_judged(found, options))
                continue
            leaf: Any = node.args[1]
            if leaf in statics and zero_heavy(values[leaf]):
                decisions.append(_refused(statics[leaf].name, values[leaf], found))
        if options.min_gain > 0:
            judged = together(graph, judged, options.min_gain)
        for each in judged:
            found, reason, gain = each.found, each.reason, each.gain
            if reason is not None and found.weight.density == 1:
                continue
            name = statics[found.weight.main].name
            if reason is None:
                plain = _without_bias(found)
                region = grow(plain, claimed)
                try:
                    key, taken = _built(name, found, region, values, options, gain)
                except CompileError as error:
                    if options.strict:
                        raise
                    failures.append(error)
                    reason = FAILED
                else:
                    claimed.update(region.members)
                    _replace(plain, region, key)
                    decisions.append(taken)
            if reason is not None:
                shape, share = found.weight.shape, found.weight.density
                decisions.append(Decision(name, found.op, shape, share, None, None, False, reason, gain))
        if failures:
            warnings.warn(f"{failures[0]}\nThis convolution stays dense.", stacklevel=3)
        if claimed:
            _keep_planar()
            graph.eliminate_dead_code()
        return decisions


def _refused(name: str, weight: torch.Tensor, reason: str) -> Decision:
    return Decision(name, "conv", tuple(weight.shape), density(weight), None, None, False, reason, None)


def _judged(found: Convolution, options: Options) -> Judgement:
    """What becomes of a convolution, looked at for itself."""
    x = found.x.meta["val"]
    reason = refusal(found)
    if reason is None and (x.dtype not in _TYPES or not x.is_cpu):
        reason = f"no sparse kernel for convolutions in {str(x.dtype).removeprefix('torch.')} on {x.device.type}"
    if reason is None and options.schedule not in ("auto", "reference"):
        reason = f"schedule {options.schedule} is not for convolutions"
    if reason is None and in_training(found.node.graph):
        reason = "trained dense: convolutions are sparse in inference only"
    if reason is not None:
        return Judgement(found, False, reason, None)
    if found.depthwise:
        return Judgement(found, True, None, None)
    gain = gain_of(found)
    if gain < options.min_gain:
        what = "small" if gain_of(found, 0.01) < options.min_gain else "dense"
        reason = f"too {what} for a gain of {options.min_gain:g}x"
    return Judgement(found, True, reason, gain)


def _keep_planar() -> None:
    """While Inductor compiles the graph: channels lie behind each other, as the kernels have them, in all convolutions."""
    if inductor_config.joint_custom_pre_pass is not None:
        inductor_config.layout_optimization = False


def _without_bias(found: Convolution) -> Convolution:
    """The convolution with its bias added afterwards, where the region takes it as it does all that is added."""
    node = found.node
    bias = node.args[2]
    if bias is None:
        return found
    rank = node.meta["val"].dim()
    emit = Emitter(node)
    plain = emit(node.target, *node.args[:2], None, *node.args[3:])
    shaped = emit(aten.reshape.default, bias, [found.m, *[1] * (rank - 2)])
    added = emit(aten.add.Tensor, plain, shaped)
    node.replace_all_uses_with(added)
    node.graph.erase_node(node)
    return replace(found, node=plain)


def _built(
    name: str, found: Convolution, region: Region, values: Mapping[fx.Node, torch.Tensor], options: Options, gain: float | None
) -> tuple[str, Decision]:
    """The key of the compiled region, which is known as long as the decision's graph, and what is told of it. CompileError."""
    kernel = _compiled(found, region)
    out = region.output.meta["val"]
    if found.depthwise:
        key = content_hash(kernel.key, found.window)
        region_op.add(key, region_op.find(key) or DepthwiseRegion(kernel, found.window, out.dtype))
        return key, _taken(found, name, region, None, gain, 0)
    leaves = [values[leaf] for leaf in found.weight.leaves]
    weight, window = found.weight, found.window
    format = next(f for f in kernel.formats if f is not None)
    assert isinstance(format, Format)
    packings = Packings.of(weight.key, weight.evaluate, format)
    densest = 1.0 if options.min_gain == 0 else max(weight.density, weight.density * (gain or 0.0))
    dims = found.x.meta["val"].dim()
    key = content_hash(kernel.key, weight.key, format, window, dims, densest, options.verify, signature(region.body))
    known = region_op.find(key)
    if known is None:
        known = ConvolvedRegion(
            kernel, packings, on_images(region.body, window, dims), window, len(leaves), densest, options.verify == "full",
            found.m, out.dtype,
        )  # fmt: skip
    region_op.add(key, known)
    packed = packings.current(leaves, densest)
    return key, _taken(found, name, region, format.name, gain, packed.nbytes if packed is not None else 0)


def _compiled(found: Convolution, region: Region) -> Kernel:
    """The kernel of a region, from the cache on disk if it is there. CompileError."""
    matrix = matrix_of(found)
    request = "\n".join(
        map(str, (_SCHEDULE, signature(region.body), matrix, found.window, found.depthwise, source_hash("gossamer.backend")))
    )
    known = recall_region(request)
    if known is not None:
        return known
    from gossamer.backend.regions.importer import import_region  # torch-mlir's front end takes half a second to load
    from gossamer.sparsity.kernels.compile_kernel import compile_region

    contract = import_region(region.body, matrix, None, found.window, found.depthwise)
    return compile_region(contract, schedule=_SCHEDULE, request=request)


def _replace(found: Convolution, region: Region, key: str) -> None:
    """Puts one call of the region op where the region was."""
    output = region.output
    emit = Emitter(output)
    extras = []
    for extra in region.extras:
        node = extra.node
        if extra.kind == "vector":
            node = emit(aten.reshape.default, node, [found.m])
        elif extra.kind == "scalar":
            node = emit(aten.reshape.default, node, [])
        extras.append(node)
    filters = found.node.args[1]
    weight = [emit(aten.reshape.default, filters, [found.m, found.k])] if found.depthwise else found.weight.leaves
    output.replace_all_uses_with(emit(region_op.region, [found.source, *weight, *extras], key))


def _taken(
    found: Convolution, name: str, region: Region, format: str | None, gain: float | None, packed_bytes: int
) -> Decision:
    fused = f"{region.fused} op{'s' * (region.fused > 1)} fused" if region.fused else "nothing to fuse"
    weight = found.weight
    if found.depthwise:
        fused = f"as it is, by a kernel that reads what the sparse layers write; {fused}"
        return Decision(name, found.op, weight.shape, weight.density, None, None, False, fused, gain)
    dense_bytes = weight.shape[0] * weight.shape[1] * found.given.itemsize
    return Decision(
        name, found.op, weight.shape, weight.density, format, _SCHEDULE, True, fused, gain, False, dense_bytes, packed_bytes,
    )  # fmt: skip
