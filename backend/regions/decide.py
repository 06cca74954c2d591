"""Decides whether a contraction becomes sparse, and makes the Decisions for the report."""

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import fx

from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.measured_times import tokens_class
from gossamer.backend.graph.inputs import Inputs, Static, density, zero_heavy
from gossamer.backend.graph.weight_expressions import Weight
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.regions.cost import predicted_gain, renewing_pays, usual_tokens
from gossamer.backend.regions.details import details_of
from gossamer.backend.regions.grow_region import epilogue
from gossamer.backend.regions.round_to_bf16 import rounded
from gossamer.backend.report.details import Details
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import Decision
from gossamer.dialects.errors import GossamerError

_INT8_PRODUCT = "_weight_int8pack_mm"
"""torch's product of floats with an int8 weight. An int8 tensor with only other uses may be anything, and is not reported."""

_REMEDIES = {
    "mkldnn_rnn_layer": ": compile under torch.backends.mkldnn.flags(enabled=False), which gives one product for each step",
    _INT8_PRODUCT: ": F.linear(x, weight.to(x.dtype)) * scales, and layers of gossamer.quantize, have one",
}
"""Advice for the report: how to avoid an operation that has no sparse kernel."""

_REPORTED = (
    "bmm", "baddbmm", "convolution", "grouped_mm_fallback", "_grouped_mm", "routed_mlp", "routed_product", "region",
    "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip
"""Operations that the passes `convolutions`, `routed-experts` and `masked-attention` report themselves."""


def judge(contraction: Contraction, options: Options, renewed: float = 0.0) -> tuple[str | None, float | None]:
    """Returns why a contraction has to stay dense (None if it may become sparse), and the predicted gain.

    renewed  the share of the weight's elements that are gathered at every training step; 0 if it is not trained
    """
    refused = refusal(contraction) or _wrong_schedule(contraction, options.schedule)
    if refused:
        return refused, None
    gain = predicted_gain(contraction)
    if gain >= options.min_gain:
        if renewed and not renewing_pays(contraction, options.min_gain, renewed):
            return (
                "packing its new values at every training step takes longer than the sparse kernel saves; "
                "gossamer.store_sparse needs no packing",
                gain,
            )
        return None, gain
    what = "small" if predicted_gain(contraction, 0.01) < options.min_gain else "dense"
    return f"too {what} for a gain of {options.min_gain:g}x", gain


def refusal(contraction: Contraction) -> str | None:
    """Returns why no kernel can compute a contraction, or None if one can."""
    return _quantized(contraction) if contraction.quantized else _refusal(contraction.weight, contraction.x.meta["val"])


def stays_dense(contraction: Contraction, name: str, reason: str, gain: float | None, min_gain: float) -> Decision:
    """Returns the Decision about a contraction that stays dense. `min_gain` is the option."""
    weight = contraction.weight
    return Decision.dense(
        name, contraction.op, weight.shape, weight.density, with_times(reason, contraction), gain, bool(contraction.times),
        weight.pattern.label, None if refusal(contraction) else details_of(contraction, min_gain),
    )  # fmt: skip


def taken(
    contraction: Contraction,
    name: str,
    format: str,
    schedule: str,
    reason: str,
    gain: float | None,
    packed_bytes: int,
    details: Details,
    measured: bool,
) -> Decision:
    """Returns the Decision about a contraction that a sparse kernel computes.

    measured  whether the gain was measured
    """
    weight = contraction.weight
    if rounded(weight.dtype, contraction.given):
        reason = f"{reason}, in bf16"
    if contraction.orders is not None:
        reason = f"{reason}, reordered into blocks"
    dense_bytes = weight.shape[0] * weight.shape[1] * contraction.given.itemsize
    return Decision(
        name, contraction.op, weight.shape, weight.density, format, schedule, True,
        with_times(reason, contraction, "alone, " if details.whole else ""), gain, measured, dense_bytes, packed_bytes,
        pattern=weight.pattern.label, details=details,
    )  # fmt: skip


def with_times(reason: str, contraction: Contraction, what: str = "") -> str:
    """Returns a reason, followed by the times that were measured for the expected number of tokens. `what` precedes these."""
    times = contraction.times.get(tokens_class(usual_tokens(contraction)))
    return f"{reason}; {what}{times}" if times is not None else reason


def left_out(
    statics: dict[fx.Node, Static], covered: Container[fx.Node], computed: Container[fx.Node]
) -> Iterator[Decision]:  # fmt: skip
    """Yields decisions about tensors with many zeros that no contraction uses as its weight.

    covered   the leaves of the weights of contractions
    computed  the nodes that are computed only from static inputs and constants
    """
    for node, static in statics.items():
        if node in covered or not zero_heavy(static.tensor, torch.int8):
            continue
        used = list(_uses(node, computed))
        if any(op in _REPORTED for op in used) or (static.tensor.dtype is torch.int8 and _INT8_PRODUCT not in used):
            continue
        op = next(iter(used), None)
        reason = f"no sparse kernel for {op}{_REMEDIES.get(op, '')}" if op else "not used in this graph"
        tensor = static.tensor
        refused = None if tensor.dtype is torch.int8 else _refusal(tensor, tensor)
        yield Decision.dense(static.name, op or "-", tensor.shape, density(tensor), refused or reason)


def overwritten(inputs: Inputs, graph: fx.Graph) -> Iterator[Decision]:
    """Yields decisions about pruned parameters that a joint graph writes to, such as a weight that `forward` clips."""
    reason = "trained dense: the model writes to it in the forward pass"
    for name, tensor in ((each.name, each.tensor) for each in inputs.overwritten(graph) if zero_heavy(each.tensor)):
        yield Decision.dense(name, "-", tensor.shape, density(tensor), reason)


def unknown(inputs: Inputs) -> Iterator[Decision]:
    """Yields decisions about matrices whose values are not known during the compilation."""
    reason = "its values are unknown at compile time (a fake tensor)"
    for name, shape in inputs.unknown:
        if len(shape) >= 2:
            yield Decision.dense(name, "-", shape, 1.0, reason)


def _refusal(weight: Weight | torch.Tensor, x: torch.Tensor) -> str | None:
    refused = _misplaced(weight, x)
    if refused is not None:
        return refused
    for tensor in (weight, x):
        if tensor.dtype not in device_of(weight.device).dtypes:
            return f"no sparse kernel for {str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"
    if weight.dtype != x.dtype and not rounded(weight.dtype, x.dtype):
        return f"weight is {weight.dtype}, its input {x.dtype}"
    return "empty weight" if 0 in weight.shape else None


def _misplaced(weight: Weight | torch.Tensor, x: torch.Tensor) -> str | None:
    """Returns why their device has no kernels, or that they are on different devices. Returns None if neither holds."""
    try:
        device_of(weight.device)
    except GossamerError as problem:
        return str(problem)
    return None if weight.device == x.device else f"weight is on {weight.device}, its input on {x.device}"


def _quantized(contraction: Contraction) -> str | None:
    weight = contraction.weight
    refused = _misplaced(weight, contraction.x.meta["val"])
    if refused is not None:
        return refused
    if (weight.dtype, contraction.given) != (torch.int8, torch.int8):
        return f"no sparse kernel for products of {contraction.given} and {weight.dtype}".replace("torch.", "")
    if contraction.side != "right":
        return "no sparse kernel for a product of int8 with the weight on the left"
    if 0 in weight.shape:
        return "empty weight"
    dtypes = device_of(weight.device).dtypes
    last = epilogue(contraction.node, (), dtypes)[-1]
    return None if last.meta["val"].dtype in dtypes else "its sums are used as integers"


def _wrong_schedule(contraction: Contraction, wanted: str) -> str | None:
    device = contraction.weight.device
    return None if wanted in ("auto", *device_of(device).schedules) else f"schedule {wanted} is not for {device.type}"


def _uses(node: fx.Node, computed: Container[fx.Node]) -> Iterator[str]:
    """Yields the names of operations that combine the tensor, or values computed only from it, with other values."""
    derived, candidates = {node}, list(node.users)
    while candidates:
        user = candidates.pop(0)
        if user.op != "call_function":
            continue
        if all(n in derived or n in computed for n in user.all_input_nodes):
            derived.add(user)
            candidates += [u for u in user.users if u not in derived]
            if any(u.op == "call_function" for u in user.users):
                continue
        target: Any = user.target
        yield getattr(target, "overloadpacket", target).__name__
