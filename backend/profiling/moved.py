"""Finds out what a call of an operation reads, writes and multiplies, and the least time that this machine needs for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, get_num_threads

from gossamer.backend.devices.calibrated import this_machine
from gossamer.backend.graph.weight_expressions import run
from gossamer.backend.run import region_op
from gossamer.backend.run.compiled_region import CompiledRegion, Variant
from gossamer.backend.run.layouts import Images, Matrices
from gossamer.runtime.elements import ELEMENTS
from gossamer.runtime.operations import OPERATIONS, tensors_in
from gossamer.runtime.packers.nonzeros import count_nonzeros
from gossamer.runtime.watching.names import name_of

_REGIONS = ("region", "chain")


@dataclass(frozen=True)
class Moved:
    """The traffic of a call of an operation.

    label        the name of the call in profiles
    weights      bytes of parameters and buffers that it reads, as they are packed
    activations  bytes of other tensors that it reads, and of its results
    least_us     the least time that this machine needs, in microseconds, by its calibration; None if it is unknown
    dense        whether torch computes it, because its weight has lost its zeros or is written to at every call
    """

    label: str
    weights: int
    activations: int
    least_us: float | None = None
    dense: bool = False


def moved(operation: str, given: Sequence[Any], result: Any) -> Moved:
    """Returns the traffic of a call with these arguments and this result."""
    operands, results, label = list(tensors_in(given)), list(tensors_in(result)), OPERATIONS[operation].called(given)
    region = region_op.find(given[1]) if operation in _REGIONS else None
    if isinstance(region, CompiledRegion):
        return _by_region(label, region, operands, results)
    weights = sum(_bytes(each) for each in operands if name_of(each) is not None)
    return Moved(label, weights, sum(map(_bytes, (*operands, *results))) - weights)


def _by_region(label: str, region: CompiledRegion, operands: list[Tensor], results: list[Tensor]) -> Moved:
    x = operands[0]
    tokens = region.layout.tokens(x.shape)
    variant = next(each for each in region.variants if tokens <= each.most_tokens)
    statics = variant.others.start
    packed = [weight.packed(operands[weight.statics]) for weight in variant.weights]
    weights = sum(_bytes(array) for each in packed if each is not None for array in each.components)
    activations = sum(map(_bytes, (x, *operands[statics:], *results)))
    if None in packed:
        return Moved(label, sum(map(_bytes, operands[1:statics])), activations, dense=True)
    return Moved(label, weights, activations, _least_us(region, variant, operands, results, weights + activations))


def _least_us(
    region: CompiledRegion, variant: Variant, operands: Sequence[Tensor], results: Sequence[Tensor], size: int
) -> float | None:
    """Returns the roofline in microseconds: all products at the speed of the best dense one, or the memory traffic if that
    takes longer; None if it is unknown."""
    x = operands[0]
    if not x.is_cpu or type(region.layout) not in (Matrices, Images) or not variant.weights or not size:
        return None  # attention multiplies more than weights
    products = 0
    for weight in variant.weights:
        matrix = run(weight.packings.evaluate, operands[weight.statics])
        tokens = results[0].numel() // matrix.shape[0] if isinstance(region.layout, Images) else x.numel() // x.shape[-1]
        products += count_nonzeros(matrix) * tokens
    machine = this_machine()
    speed = machine.speeds.get(ELEMENTS.get(matrix.dtype, ""))
    if speed is None:
        return None
    return max(speed.least * products * 1e-6, size / machine.read.at(size) / 1e3) / get_num_threads()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
