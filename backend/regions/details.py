"""Makes the details of a Decision for the report: contenders, the zeros that a layer would need, and where its kernel ends."""

import operator
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.measured_times import DENSE, tokens_class
from gossamer.backend.graph.layout import is_view
from gossamer.backend.graph.nodes import in_training
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.regions.cost import corrected, matrix_of, transposes_us, usual_tokens
from gossamer.backend.report.details import Contender, Details, Question
from gossamer.backend.report.report import Decision
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing


def details_of(contraction: Contraction, min_gain: float) -> Details:
    """Returns the details of a contraction that do not depend on the decision. See `answered` for the others."""
    c, tokens, dtype = contraction, usual_tokens(contraction), str(contraction.weight.dtype).removeprefix("torch.")
    times = c.times.get(tokens_class(tokens))
    us = {} if times is None else dict(times.us)
    device = str(c.weight.device)
    question = Question(device, matrix_of(c), c.weight.density, c.tokens, us, transposes_us(c), min_gain)
    return Details(tokens, c.dynamic, dtype, question=question)


def answered(decisions: Iterable[Decision]) -> list[Decision]:
    """Returns the decisions with complete details: contenders, and the share of zeros from which on sparse is faster."""
    return [each if each.details is None else replace(each, details=_answered(each.details)) for each in decisions]


def _answered(details: Details) -> Details:
    if (question := details.question) is None:
        return details
    contenders = tuple(_contenders(question, details.tokens))
    pays = _pays_from(question) if question.min_gain > 0 else None
    return replace(details, contenders=contenders, pays_from=pays, question=None)


def _contenders(question: Question, tokens: int) -> Iterable[Contender]:
    """Yields dense, then the schedules by predicted time, then schedules that were only measured."""
    device, matrix, us = device_of(torch.device(question.device)), question.matrix, dict(question.us)
    base = device.predict(matrix, tokens)
    yield Contender(DENSE, base.dense_us, us.pop(DENSE, None))
    for name, found in base.by_schedule:
        yield Contender(name, found, us.pop(name, None), device.terms(matrix, tokens, name))
    for name, found in us.items():
        yield Contender(name, None, found)


def _pays_from(question: Question) -> float | None:
    """Returns the share of zeros from which on a weight with this pattern gains enough by itself, or None if no share does."""
    q, device = question, device_of(torch.device(question.device))
    base = device.predict(replace(q.matrix, density=q.density), q.tokens)

    def gains(percent: int) -> bool:
        found = device.predict(replace(q.matrix, density=percent / 100), q.tokens)
        found = corrected(found, base, q.us, device.call_us) if q.us else found
        return found.dense_us / (found.sparse_us + q.copies_us) >= q.min_gain

    if not gains(1):
        return None
    pays, loses = 1, 101
    while loses - pays > 1:
        percent = (pays + loses) // 2
        pays, loses = (percent, loses) if gains(percent) else (pays, percent)
    return round(1 - pays / 100, 2)


def end_of(output: fx.Node) -> str:
    """Returns why a kernel that computes `output` ends there: the operations that take its result."""
    returned, takers, waiting, seen = False, list[str](), [output], {output}
    while waiting:
        for user in waiting.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if user.op == "output":
                returned = True
            elif is_view(user) or user.target is operator.getitem:
                waiting.append(user)
            else:
                takers.append(f"`{getattr(user.target, '__name__', user.target)}`")
    goes = " and ".join(dict.fromkeys(takers))
    said = ["the graph returns its result"] * returned + [f"its result goes to {goes}"] * bool(goes)
    text = " and ".join(said) or "nobody reads its result"
    if in_training(output.graph):
        return f"{text}; with gradients, a kernel ends at each value that the backward pass reads"
    return text


def array_names(format: Format | Packing, count: int) -> list[str]:
    """Returns the names of the arrays that a weight is packed in, in order."""
    if isinstance(format, Packing):
        names = [component.name for component in format.components()]
    else:
        names = []
        for number, level in enumerate(format.levels):
            names += [f"positions of level {number}"] * ("compressed" in level.kind)
            names += [f"coordinates of level {number}"] * (level.kind != "dense")
        names.append("values")
    return names if len(names) == count else [f"array {number}" for number in range(count)]
