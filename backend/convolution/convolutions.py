"""convolutions: those with a static weight that is mostly zeros, with what follows them, as sparse kernels.

%y = convolution(%x, %w, %bias, ...)         →    %z = gossamer::region([%x, %w, %bias], "3f2a…")
%z = relu(%y)
"""

import warnings
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.calls import region_op
from gossamer.backend.calls.convolved_region import ConvolvedRegion, on_images
from gossamer.backend.calls.packed_weights import Packings
from gossamer.backend.convolution.convolution import Convolution, dense_us, find, gain_of
from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.kernel import Kernel
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import density, zero_heavy
from gossamer.backend.graph.nodes import hint
from gossamer.backend.regions.build_region import content_hash
from gossamer.backend.regions.contractions import in_training
from gossamer.backend.regions.cost import matrix_of
from gossamer.backend.regions.decide import refusal
from gossamer.backend.regions.grow_region import Region, grow
from gossamer.backend.regions.importer import import_region
from gossamer.backend.regions.matrix_functions import signature
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import FAILED, Decision
from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.runtime.torch_internals import inductor_config
from gossamer.sparsity.kernels.compile_kernel import compile_region

aten = torch.ops.aten

_SCHEDULE = "convolve"
_TYPES = (torch.float32, torch.float64)
_FEW_CHANNELS = 4  # images as they come: oneDNN reads those as they are


class Convolutions:
    """Convolutions with a sparse weight become regions."""

    name: ClassVar[str] = "convolutions"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """A decision for each convolution whose weight has zeros."""
        statics = context.inputs.match(graph)
        values = {node: static.tensor for node, static in statics.items()}
        decisions, claimed, replaced = list[Decision](), set[fx.Node](), dict[fx.Node, fx.Node]()
        failures = list[CompileError]()
        candidates = find(graph, values)
        alone = context.options.min_gain > 0 and not _planar_pays(graph, [c for _, c in candidates], context.options)
        for node, found in candidates:
            if isinstance(found, str):
                leaf: Any = node.args[1]
                if leaf in statics and zero_heavy(values[leaf]):
                    decisions.append(_refused(statics[leaf].name, values[leaf], found))
                continue
            if found.weight.density == 1 and context.options.min_gain > 0:
                continue
            name = statics[found.weight.main].name
            reason, gain = _judged(found, context.options)
            if reason is None and alone:
                reason = "the dense convolutions around it would lose more without channels_last than it gains"
            if reason is None:
                leaves = [values[leaf] for leaf in found.weight.leaves]
                with_bias = _without_bias(found)
                region = grow(with_bias, claimed)
                try:
                    key, built = _built(region, with_bias, leaves, context.options, gain or 0.0)
                except CompileError as error:
                    if context.options.strict:
                        raise
                    failures.append(error)
                    reason = FAILED
                else:
                    claimed.update(region.members)
                    _replace(region, key, replaced)
                    decisions.append(_taken(found, name, region, built, gain, leaves))
            if reason is not None:
                shape, share = found.weight.shape, found.weight.density
                decisions.append(Decision(name, found.op, shape, share, None, None, False, reason, gain))
        if failures:
            warnings.warn(f"{failures[0]}\nThis convolution stays dense.", stacklevel=3)
        if replaced:
            _keep_planar()
            graph.eliminate_dead_code()
        return decisions


def _refused(name: str, weight: torch.Tensor, reason: str) -> Decision:
    return Decision(name, "conv", tuple(weight.shape), density(weight), None, None, False, reason, None)


def _judged(found: Convolution, options: Options) -> tuple[str | None, float | None]:
    """Why a convolution stays dense, None if it becomes sparse, and the predicted gain."""
    x = found.x.meta["val"]
    reason = refusal(found)
    if reason is None and (x.dtype not in _TYPES or not x.is_cpu):
        reason = f"no sparse kernel for convolutions in {str(x.dtype).removeprefix('torch.')} on {x.device.type}"
    if reason is None and options.schedule not in ("auto", "reference"):
        reason = f"schedule {options.schedule} is not for convolutions"
    if reason is None and in_training(found.node.graph):
        reason = "trained dense: convolutions are sparse in inference only"
    if reason is not None:
        return reason, None
    gain = gain_of(found)
    if gain >= options.min_gain:
        return None, gain
    what = "small" if gain_of(found, 0.01) < options.min_gain else "dense"
    return f"too {what} for a gain of {options.min_gain:g}x", gain


def _planar_pays(graph: fx.Graph, found: list[Convolution | str], options: Options) -> bool:
    """Whether sparse convolutions gain more than the dense ones lose, whose images oneDNN reorders, and back, where they are
    planar."""
    gained, sparse = 0.0, set[fx.Node]()
    for each in found:
        if not isinstance(each, str) and _judged(each, options)[0] is None:
            gained += dense_us(each) * (1 - 1 / gain_of(each))
            sparse.add(each.node)
    lost = 0.0
    for node in graph.nodes:
        if node.target is aten.convolution.default and node not in sparse:
            sizes = [[hint(n) or 1 for n in value.meta["val"].shape] for value in (node.args[0], node)]
            given = node.meta["val"]
            if sizes[0][1] > _FEW_CHANNELS and given.is_cpu:
                lost += device_of(given.device).transpose_us(sum(map(prod, sizes)) * given.itemsize)
    return gained > lost / torch.get_num_threads()


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
    return Convolution(
        plain, found.x, found.weight, found.side, found.m, found.k, None, 1, 1, window=found.window
    )  # fmt: skip


def _built(
    region: Region, found: Convolution, leaves: list[torch.Tensor], options: Options, gain: float
) -> tuple[str, ConvolvedRegion]:
    """The compiled region under its key, its weight packed. CompileError."""
    weight, window = found.weight, found.window
    contract = import_region(region.body, matrix_of(found), None, window)
    kernel: Kernel = compile_region(contract, schedule=_SCHEDULE)
    format = next(f for f in kernel.formats if f is not None)
    assert isinstance(format, Format)
    packings = Packings.of(weight.key, weight.evaluate, format)
    densest = 1.0 if options.min_gain == 0 else max(weight.density, weight.density * gain)
    dims, out = found.x.meta["val"].dim(), region.output.meta["val"]
    key = content_hash(kernel.key, weight.key, format, window, dims, densest, options.verify, signature(region.body))
    known = region_op.find(key)
    if known is None:
        known = ConvolvedRegion(
            kernel, packings, on_images(region.body, window, dims), window, len(leaves), densest, options.verify == "full",
            found.m, out.dtype,
        )  # fmt: skip
    built = region_op.add(key, known)
    assert isinstance(built, ConvolvedRegion)
    packings.current(leaves, densest)
    return key, built


def _replace(region: Region, key: str, replaced: dict[fx.Node, fx.Node]) -> None:
    """Puts one call of the region op where the region was."""
    contraction, output = region.contraction, region.output
    emit = Emitter(output, replaced)
    extras = []
    for extra in region.extras:
        node = emit.now(extra.node)
        if extra.kind == "vector":
            node = emit(aten.reshape.default, node, [contraction.m])
        elif extra.kind == "scalar":
            node = emit(aten.reshape.default, node, [])
        extras.append(node)
    y = emit(region_op.region, [emit.now(contraction.x), *contraction.weight.leaves, *extras], key)
    output.replace_all_uses_with(y)
    replaced[output] = y


def _taken(
    found: Convolution, name: str, region: Region, built: ConvolvedRegion, gain: float | None, leaves: list[torch.Tensor]
) -> Decision:
    fused = f"{region.fused} op{'s' * (region.fused > 1)} fused" if region.fused else "nothing to fuse"
    weight, packed = found.weight, built.packings.current(leaves, built.densest)
    dense_bytes = weight.shape[0] * weight.shape[1] * found.given.itemsize
    format = next(f for f in built.kernel.formats if f is not None)
    return Decision(
        name, found.op, weight.shape, weight.density, format.name, _SCHEDULE, True, fused, gain, False, dense_bytes,
        packed.nbytes if packed is not None else 0,
    )  # fmt: skip
