"""Builds the region of a convolution: compiles its kernel, or finds it in the cache, and packs its weight."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from gossamer.backend.convolution.bands import band_rows, of_rows
from gossamer.backend.convolution.convolution import Convolution
from gossamer.backend.convolution.cost import CONVOLVE
from gossamer.backend.devices.device_kernel import Kernel
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import noticed
from gossamer.backend.regions.build_region import arrays_of, code_of, content_hash
from gossamer.backend.regions.compiled_kernel import compiled_kernel
from gossamer.backend.regions.cost import matrix_of
from gossamer.backend.regions.grow_region import Region
from gossamer.backend.regions.matrix_functions import signature
from gossamer.backend.report.details import Details
from gossamer.backend.report.dump import Dump
from gossamer.backend.report.report import Decision
from gossamer.backend.run import region_op
from gossamer.backend.run.compiled_region import Band, CompiledRegion, Variant, Weight
from gossamer.backend.run.labels import about
from gossamer.backend.run.layouts import Images, Matrices
from gossamer.backend.run.packed_weights import Packings
from gossamer.backend.run.reference_region import ReferenceRegion
from gossamer.dialects.format import Format
from gossamer.dialects.window import Window
from gossamer.runtime.packing import Packed

aten = torch.ops.aten

REFERENCE = "reference"

_DENSEST = 0.9
"""The density above which a convolution runs dense, whatever its gain was. Weights may lose zeros in training."""


def build(
    name: str,
    found: Convolution,
    region: Region,
    values: Mapping[fx.Node, torch.Tensor],
    gain: float | None,
    context: GraphContext,
    details: Details | None,
) -> tuple[str, Decision]:
    """Builds a region. Returns the key by which `gossamer::region` finds it, and the decision with these details.

    Raises CompileError.
    """
    options = context.options
    schedule = REFERENCE if options.schedule == REFERENCE else CONVOLVE
    kernel = compiled(name, found, region, schedule, context.dump)
    rows = band_rows(found, region) if schedule == CONVOLVE else None
    if found.depthwise:
        key = content_hash(kernel.key, found.window)
        region_op.add(key, region_op.find(key) or as_images(found, region, kernel, ()))
        return key, _told(name, found, region, None, schedule, gain, None, None)
    weight, leaves = found.weight, [values[leaf] for leaf in found.weight.leaves]
    verify, format = noticed(weight.leaves, options.verify), next(f for f in kernel.formats if f is not None)
    assert isinstance(format, Format)
    packings = Packings.of(weight.key, weight.evaluate, format)
    densest = 1.0 if options.min_gain == 0 else max(weight.density, min(weight.density * (gain or 0.0), _DENSEST))
    dims = found.x.meta["val"].dim()
    key = content_hash(kernel.key, weight.key, format, found.window, dims, densest, verify, signature(region.body), rows)
    known = region_op.find(key)
    if known is None:
        own = (Weight(packings, slice(1, 1 + len(leaves)), densest, renew=True, verify=verify == "full"),)
        if schedule == REFERENCE:
            known = _reference(found, region, kernel, own)
        else:
            band = (
                None
                if rows is None
                else Band(compiled(f"{name}.band", *of_rows(found, region, rows), schedule, context.dump), rows)
            )
            known = as_images(found, region, kernel, own, on_images(region.body, found.window, dims), band)
    region_op.add(key, known)
    packed = packings.current(leaves, densest)
    if details is not None:
        details = replace(details, region=key, arrays=arrays_of(packed))
    return key, _told(name, found, region, format.name, schedule, gain, packed, details)


def as_images(
    found: Convolution, region: Region, kernel: Kernel, weights: tuple[Weight, ...], body: Any = None,
    band: Band | None = None,
) -> CompiledRegion:  # fmt: skip
    """Returns the callable of a convolution. `body` computes it dense; a depthwise one never is, and has none."""
    said = about("", region.members, [found.node])
    return CompiledRegion((Variant(math.inf, kernel, weights),), _images(found, region.output), body, band=band, about=said)


def _reference(found: Convolution, region: Region, kernel: Kernel, weights: tuple[Weight, ...]) -> ReferenceRegion:
    layout = _images(found, region.output)
    rows = CompiledRegion((Variant(math.inf, kernel, weights),), Matrices(((found.m, layout.dtype),)), region.body)
    return ReferenceRegion(rows, layout)


def _images(found: Convolution, output: fx.Node) -> Images:
    dims, channels = (2, None) if found.depthwise else (3, found.m)
    return Images(found.window, dims, channels, output.meta["val"].dtype)


def compiled(name: str, found: Convolution, region: Region, schedule: str, dump: Dump | None) -> Kernel:
    """Returns the kernel of a region. Raises CompileError."""
    matrix, window = matrix_of(found), None if schedule == REFERENCE else found.window

    def contract() -> str:
        from gossamer.backend.regions.importer import import_region  # torch-mlir's front end takes half a second to load

        return import_region(region.body, matrix, None, window, found.depthwise)

    request = "\n".join(map(str, (schedule, signature(region.body), matrix, found.window, found.depthwise)))
    return compiled_kernel("region", name, request, schedule, found.weight.device, contract, dump, lambda: code_of(region.body))


def _told(
    name: str,
    found: Convolution,
    region: Region,
    format: str | None,
    schedule: str,
    gain: float | None,
    packed: Packed | None,
    details: Details | None,
) -> Decision:
    fused = f"{region.fused} op{'s' * (region.fused > 1)} fused" if region.fused else "nothing to fuse"
    weight = found.weight
    if found.depthwise or found.density == 1:
        reason = f"as it is, by a kernel that reads what the sparse layers write; {fused}"
        return Decision.dense(name, found.op, weight.shape, found.density, reason, gain)
    dense_bytes = weight.shape[0] * weight.shape[1] * found.given.itemsize
    return Decision(
        name, found.op, weight.shape, found.density, format, schedule, True, fused, gain, found.measured,
        dense_bytes, packed.nbytes if packed is not None else 0, pattern=weight.pattern.label, details=details,
    )  # fmt: skip


def on_images(body: fx.GraphModule, window: Window, dims: int) -> fx.GraphModule:
    """Turns a body on matrices (see `matrix_functions`) into one on images with `dims` dimensions: mm becomes convolution."""
    graph = fx.Graph()
    result = graph.graph_copy(body.graph, copies := dict[fx.Node, fx.Node]())
    graph.output(result)
    product = copies[next(n for n in body.graph.nodes if n.target is aten.mm.default)]
    x, w, *others = (copies[node] for node in body.graph.nodes if node.op == "placeholder")
    kernel, stride, dilation = (list(sizes[5 - dims :]) for sizes in (window.kernel, window.stride, window.dilation))
    around = [n for sides in zip(window.before[::-1], window.after[::-1], strict=True) for n in sides][: 2 * dims - 4]
    with graph.inserting_before(product):
        rows = graph.call_function(aten.sym_size.int, (w, 0))
        filters = graph.call_function(aten.reshape.default, (w, [rows, -1, *kernel]))
        padded = graph.call_function(aten.constant_pad_nd.default, (x, around)) if any(around) else x
        given = (padded, filters, None, stride, [0] * (dims - 2), dilation, False, [0] * (dims - 2), window.groups)
        dense = graph.call_function(aten.convolution.default, given)
        for each in others:
            if len(each.meta["shape"]) == 1:
                readers = list(each.users)
                spread = graph.call_function(aten.reshape.default, (each, [-1, *[1] * (dims - 2)]))
                for reader in readers:
                    reader.replace_input_with(each, spread)
    product.replace_all_uses_with(dense)
    graph.eliminate_dead_code()
    return fx.GraphModule({}, graph, "Convolution")
