"""Derives advice from the decisions of a report: what the user can change to gain more, each with the weights that it is about.

[{"title": "Prune further", "text": "42 % of classifier.weight are zeros. From 55 % on ...", "weights": [...], "gain": 1.4}]
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_UNPRUNED = ("it has no zeros", "it has hardly any zeros")
_TOO_DENSE, _TOO_SMALL = "too dense for a gain", "too small for a gain"
_FAILED = "it failed to compile"
_CLOSE = 0.1
"""Share of the wanted gain within which a predicted gain counts as close, so that measuring it may change the decision."""


def advice_for(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the advice for a report as `page_data` has it, the most useful first."""
    return [*_breaks(report), *_gradients(report), *_zeros(report), *_failures(report), *_measure(report), *_ends(report)]


def _advice(title: str, text: str, decisions: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    return {"title": title, "text": text, "weights": list(dict.fromkeys(each["name"] for each in decisions))}


def _are(count: int, what: str) -> str:
    return f"1 {what} is" if count == 1 else f"{count} {what}s are"


def _on(kernels: int) -> str:
    return "1 kernel" if kernels == 1 else f"{kernels} kernels"


def _breaks(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for reason in report["breaks"]:
        text = re.sub(r"^\S+:\d+(?=: )|(?<= Write )[^`]+?(?= before you compile)", r"`\g<0>`", reason).removesuffix(".")
        yield _advice("Remove a graph break", f"{text}. No kernel and no chain crosses this line.")


def _gradients(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    other = report.get("other")
    if not report["training"] or other is None:
        return
    joined = other["kernels"] < min(report["kernels"], other["sparse"])  # one kernel computes several layers
    if other["sparse"] > report["sparse"] or (other["sparse"] == report["sparse"] and joined):
        yield _advice(
            "Compile for inference",
            f"This report is about training. In inference, that is in eval() mode or under torch.no_grad(), "
            f"{_are(other['sparse'], 'weight')} sparse on {_on(other['kernels'])}. "
            f"Here {_are(report['sparse'], 'weight')} sparse on {_on(report['kernels'])}.",
        )


def _zeros(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    decisions = report["decisions"]
    unpruned = [each for each in decisions if each["reason"] in _UNPRUNED]
    if unpruned and not any(each["sparse"] for each in decisions):
        text = "No weight has enough zeros. Prune the model, for example by `gossamer.prune(model, batches, sparsity=0.8)`."
        yield _advice("Prune the model", text, unpruned)
    elif unpruned:
        have = "1 weight has" if len(unpruned) == 1 else f"{len(unpruned)} weights have"
        text = f"{have} no zeros or hardly any. `gossamer.prune(model, batches, only=[...])` prunes some."
        yield _advice("Prune more weights", text, unpruned)
    for each in decisions:
        if not each["sparse"] and each["reason"].startswith(_TOO_DENSE):
            pays, zeros = each["details"] and each["details"]["pays_from"], 1 - each["density"]
            if pays is not None and pays > zeros:
                text = f"{zeros:.0%} of {each['name']} are zeros. From {pays:.0%} on a sparse kernel is predicted to pay here."
                yield _advice("Prune further", text, [each])
    small = [each for each in decisions if not each["sparse"] and each["reason"].startswith(_TOO_SMALL)]
    if small:
        text = (
            f"{_are(len(small), 'weight')} too small for {_tokens(small[0]['details'])}: the call of a kernel "
            "takes as long as the dense product. A larger batch may change that."
        )
        yield _advice("Use larger batches", text, small)


def _tokens(details: Mapping[str, Any] | None) -> str:
    count = details and details["tokens"]
    return "1 token" if count == 1 else f"{count or 'so few'} tokens"


def _failures(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    failed = [each for each in report["decisions"] if _FAILED in each["reason"]]
    if failed:
        yield _advice("Report a failure", 'A kernel failed to compile. `options={"strict": True}` shows the error.', failed)


def _measure(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    wanted = report["min_gain"]
    close = [
        each
        for each in report["decisions"]
        if wanted > 0 and each["gain"] is not None and not each["measured"] and abs(each["gain"] / wanted - 1) < _CLOSE
    ]
    if close:
        text = (
            f"{_are(len(close), 'decision')} close, with a predicted gain within {_CLOSE:.0%} of {wanted:g}. "
            '`torch.compile(model, backend="sparse", mode="max-autotune")` measures them.'
        )
        yield _advice("Measure what is close", text, close)


def _ends(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields advice for each reason why kernels end, if there are at least two kernels."""
    ends: dict[str, list[Mapping[str, Any]]] = {}
    for each in report["decisions"]:
        if each["sparse"] and each["details"] and each["details"]["end"]:
            ends.setdefault(each["details"]["end"], []).append(each)
    kernels = {each["details"]["region"] for group in ends.values() for each in group}
    if len(kernels) < 2:
        return
    for end, group in ends.items():
        regions = {each["details"]["region"] for each in group}
        if end != "the graph returns its result":
            count = "One kernel ends" if len(regions) == 1 else f"{len(regions)} kernels end"
            yield _advice("Longer chains", f"{count} here: {end}. Its result goes through memory.", group)
