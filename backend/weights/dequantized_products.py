"""dequantized-products: products of dequantized int8 factors become products of int8, as in models quantized by torch.export.

    %x = dequantize_per_tensor(%q, s, z)          uint8 or int8 [..., K]
    %w = dequantize_per_channel(%w8, %sw, 0)      int8 [M, K], many zeros
    addmm(%bias, %x, permute(%w))

    →   (_int_mm(int8(%q - 128), permute(%w8)) + (128 - z) row_sums(%w8)) * s * %sw + %bias

If %q is int8, there is no 128. If %q is quantize_per_tensor(%f, s, z) with numbers s and z, its steps are written out in
float32: clamp(round(%f / s) + z - 128). So a chain can compute them between its products.

Sums of int8 products are exact, so the result differs from that of floats only by their rounding. A product stays as it is if
the cost model predicts that int8 is slower than floats, dense or sparse. The zero points of the weight must be 0, as in
symmetric quantization. That is checked when the graph is compiled. If row_sums is so large that f32 rounds its product with
(128 - z), the product stays, too, because a small result would vanish in the rounding.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Static, density
from gossamer.backend.graph.nodes import COPIES, SPREADS, VIEWS, arguments, same
from gossamer.backend.regions.contractions import Contraction, contraction_at
from gossamer.backend.regions.cost import predicted
from gossamer.backend.regions.decide import judge
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Decision
from gossamer.backend.run.row_sums import row_sums
from gossamer.runtime.int8_product import int8_product

aten, prims = torch.ops.aten, torch.ops.prims

_BY_TENSOR, _BY_ROW = "quantized_decomposed::dequantize_per_tensor", "quantized_decomposed::dequantize_per_channel"
_MOVES = SPREADS | {aten.permute.default, aten.transpose.int, aten.t.default}
"""Operations that keep all values. Quantization gives the same result before them as after them."""

_QUANTIZED = "quantized_decomposed::quantize_per_tensor"
_MIDDLE = 128  # the middle of the range of uint8
_EXACT = 1 << 24  # f32 has all integers up to this one


@dataclass(frozen=True)
class _Factors:
    """The integer factors of a product of floats.

    x           [..., K], uint8 or int8; its floats are step * (x - zero)
    step, zero  numbers, or tensors of one element
    weight      [M, K], int8; its floats are scale * weight
    scale       a number, or [M]
    bias        [M], or None
    """

    x: fx.Node
    step: Any
    zero: Any
    weight: fx.Node
    scale: Any
    bias: fx.Node | None


class DequantizedProducts:
    """Products of dequantized factors become products of int8."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Makes no decision. sparse-weights decides about the new products."""
        statics = context.inputs.match(graph)
        values = {node: static.tensor for node, static in statics.items()}
        signed: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            factors = _factors(node, statics)
            if factors is None:
                continue
            floats = contraction_at(node, values)
            emit = Emitter(node)
            product = _product(emit, factors, signed)
            result = _rescaled(emit, product, factors)
            integers = contraction_at(product, values)
            if floats is not None and integers is not None and _pays(integers, floats, context.options):
                node.replace_all_uses_with(result)
        graph.eliminate_dead_code()
        return []


def _pays(integers: Contraction, floats: Contraction, options: Options) -> bool:
    refused, _ = judge(integers, options)
    if refused is not None or options.min_gain == 0:
        return refused is None
    return predicted(integers, integers.tokens).sparse_us <= predicted(floats, floats.tokens).sparse_us


def _product(emit: Emitter, factors: _Factors, signed: dict[fx.Node, fx.Node]) -> fx.Node:
    """Emits the product with exact sums, int32 [T, M]. `signed` has the int8 values of factors in earlier products."""
    x = signed.get(factors.x)
    if x is None:
        x = signed[factors.x] = _signed(factors.x)
    rows = emit(aten.reshape.default, x, [-1, factors.weight.meta["val"].shape[1]])
    product = aten._int_mm.default if x.meta["val"].device.type == "cpu" else int8_product
    return emit(product, rows, emit(aten.permute.default, factors.weight, [1, 0]))


def _signed(x: fx.Node) -> fx.Node:
    """Emits x as int8, directly after x: if it is uint8, minus 128."""
    middle, views = _middle(x), [x]
    emit = Emitter(x.next)
    while views[0].target in _MOVES:
        views.insert(0, arguments(views[0])[0])
    made, *views = views
    if _name(made) == _QUANTIZED and _is_plain(made):
        real, step, zero, low, high, _ = arguments(made)
        for view in views:
            real = emit(view.target, real, *view.args[1:], **view.kwargs)
        rounded = emit(aten.round.default, emit(aten.mul.Tensor, real, 1.0 / step))
        moved = emit(aten.add.Tensor, rounded, float(zero - middle))
        # Inductor lowers clamp only in the form of these two.
        bounded = emit(aten.clamp_max.default, emit(aten.clamp_min.default, moved, float(low - middle)), float(high - middle))
        return emit(prims.convert_element_type.default, bounded, torch.int8)
    if not middle:
        return x
    wide = emit(aten.sub.Tensor, emit(prims.convert_element_type.default, x, torch.int32), middle)
    return emit(prims.convert_element_type.default, wide, torch.int8)


def _middle(x: fx.Node) -> int:
    return _MIDDLE if x.meta["val"].dtype is torch.uint8 else 0


def _is_plain(x: fx.Node) -> bool:
    """Whether x is quantized from float32, by known numbers."""
    if len(x.args) != 6:
        return False
    real, *by, _ = x.args
    return isinstance(real, fx.Node) and real.meta["val"].dtype is torch.float32 and all(isinstance(n, int | float) for n in by)


def _rescaled(emit: Emitter, product: fx.Node, factors: _Factors) -> fx.Node:
    """Emits the floats that the sums stand for, float32 [T, M]."""

    def real(given: Any) -> Any:
        return emit(prims.convert_element_type.default, given, torch.float32) if isinstance(given, fx.Node) else given

    middle = _middle(factors.x)
    zero, step, scale = factors.zero, real(factors.step), real(factors.scale)
    y = emit(prims.convert_element_type.default, product, torch.float32)
    if isinstance(zero, fx.Node) or zero != middle:
        shift = (
            emit(aten.sub.Tensor, emit(aten.neg.default, real(zero)), -middle) if isinstance(zero, fx.Node) else middle - zero
        )
        y = emit(aten.add.Tensor, y, emit(aten.mul.Tensor, emit(row_sums, factors.weight), shift))
    if isinstance(scale, fx.Node):
        y = emit(aten.mul.Tensor, y, emit(aten.mul.Tensor, scale, step))
    else:
        y = emit(aten.mul.Tensor, y, emit(aten.mul.Tensor, step, scale) if isinstance(step, fx.Node) else step * scale)
    return y if factors.bias is None else emit(aten.add.Tensor, y, factors.bias)


def _factors(node: fx.Node, statics: dict[fx.Node, Static]) -> _Factors | None:
    """Returns the factors of a product if both are dequantized int8, and one is a weight with zeros. Otherwise returns None."""
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs or node.meta["val"].dtype is not torch.float32:
        return None
    bias = arguments(node)[0] if node.target is aten.addmm.default else None
    if isinstance(bias, fx.Node) and bias.meta["val"].dim() != 1:
        return None
    left, right = node.args[-2:]
    x, turned = _before(left), same(right)
    if turned.target is not aten.t.default and (turned.target is not aten.permute.default or turned.args[1] != [1, 0]):
        return None
    weight = same(turned.args[0])
    if _name(x) != _BY_TENSOR or _name(weight) not in (_BY_TENSOR, _BY_ROW):
        return None
    given, step, zero = arguments(x)[:3]
    integers, scale, offset = arguments(weight)[:3]
    static = statics.get(integers)
    if static is None or static.tensor.dtype is not torch.int8 or static.tensor.dim() != 2:
        return None
    by_row = _name(weight) == _BY_ROW
    if not _is_zero(offset, statics) or (by_row and weight.args[3] != 0):
        return None
    # torch._int_mm returns wrong numbers for a single column (PyTorch 2.13, on CPUs).
    if static.tensor.shape[1] < 2 or density(static.tensor) == 1:
        return None
    if given.meta["val"].dtype not in (torch.int8, torch.uint8):
        return None
    if zero != _middle(given) and int(static.tensor.sum(1, dtype=torch.int32).abs().max()) * _MIDDLE > _EXACT:
        return None
    return _Factors(given, step, zero, integers, scale, bias)


def _before(node: Any) -> Any:
    """Returns the value before views and copies."""
    while node.target in VIEWS | COPIES:
        node = node.args[0]
    return node


def _name(node: fx.Node) -> str:
    """Returns the name of an operator without its overload. Compares by name, because quantization libraries define these
    operators after Gossamer was imported."""
    return getattr(getattr(node.target, "_schema", None), "name", "")


def _is_zero(offset: Any, statics: dict[fx.Node, Static]) -> bool:
    if isinstance(offset, fx.Node):
        return offset in statics and not bool(statics[offset].tensor.any())
    return bool(offset == 0)
