"""What a report says of a contraction beside its Decision: contenders, the zeros it would need, where its kernel ends."""

import operator
from collections.abc import Iterable

from torch import fx

from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.measured_times import DENSE, tokens_class
from gossamer.backend.graph.layout import is_view
from gossamer.backend.graph.nodes import in_training
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.regions.cost import matrix_of, predicted_gain, usual_tokens
from gossamer.backend.report.details import Contender, Details
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing


def details_of(contraction: Contraction, min_gain: float) -> Details:
    """The details of a contraction, as far as they do not depend on what is decided."""
    tokens, dtype = usual_tokens(contraction), str(contraction.weight.dtype).removeprefix("torch.")
    contenders = tuple(_contenders(contraction, tokens))
    pays = _pays_from(contraction, min_gain) if min_gain > 0 else None
    return Details(tokens, contraction.dynamic, dtype, contenders, pays)


def _contenders(contraction: Contraction, tokens: int) -> Iterable[Contender]:
    """Dense and the schedules by their predictions, which measurements of this product have corrected."""
    device, matrix = device_of(contraction.weight.device), matrix_of(contraction)
    base = device.predict(matrix, tokens)
    times = contraction.times.get(tokens_class(tokens))
    us = {} if times is None else dict(times.us)
    yield Contender(DENSE, base.dense_us, us.pop(DENSE, None))
    for name, found in base.by_schedule:
        yield Contender(name, found, us.pop(name, None), device.terms(matrix, tokens, name))
    for name, found in us.items():
        yield Contender(name, None, found)


def _pays_from(contraction: Contraction, min_gain: float) -> float | None:
    """The share of zeros from which on a weight with this pattern gains enough by itself; None if none is."""
    if predicted_gain(contraction, 0.01) < min_gain:
        return None
    pays, loses = 1, 101
    while loses - pays > 1:
        percent = (pays + loses) // 2
        pays, loses = (percent, loses) if predicted_gain(contraction, percent / 100) >= min_gain else (pays, percent)
    return round(1 - pays / 100, 2)


def end_of(output: fx.Node) -> str:
    """Why a kernel that computes `output` ends there: who takes its result."""
    takers, waiting, seen = list[str](), [output], {output}
    while waiting:
        for user in waiting.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if user.op == "output":
                takers.append("the graph returns its result")
            elif is_view(user) or user.target is operator.getitem:
                waiting.append(user)
            else:
                takers.append(f"its result goes to `{getattr(user.target, '__name__', user.target)}`")
    text = ", ".join(dict.fromkeys(takers)) or "nobody reads its result"
    if in_training(output.graph):
        return f"{text}; with gradients, a kernel ends at each value that the backward pass reads"
    return text


def array_names(format: Format | Packing, count: int) -> list[str]:
    """The names of the arrays that a weight is packed in, in their order."""
    if isinstance(format, Packing):
        names = [component.name for component in format.components()]
    else:
        names = []
        for number, level in enumerate(format.levels):
            names += [f"positions of level {number}"] * ("compressed" in level.kind)
            names += [f"coordinates of level {number}"] * (level.kind != "dense")
        names.append("values")
    return names if len(names) == count else [f"array {number}" for number in range(count)]
