"""Compiles a graph with sparse and with dense convolutions if the prediction for them together is close, and times both.

Convolutions are judged together, because images are reordered between sparse and dense ones. Inductor compiles the work
between them, such as activations and gates, for either order, and no prediction has its time. So both versions run on the
example inputs, side by side. The gain is kept on disk. Later processes compile the faster version only.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import fx

from gossamer.backend.devices.budget import Budget
from gossamer.backend.devices.trial import Trial
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.nodes import hint
from gossamer.backend.graph_cache import weights_here
from gossamer.backend.measuring.kept import kept
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import withheld
from gossamer.runtime.torch_internals import disable_current_modes, is_fake

Compiled = Callable[..., Any]

_ROUNDS = 5


def faster_version(
    module: fx.GraphModule, values: Sequence[Any], options: Options, compile_: Callable[[Trial | None], Compiled]
) -> Compiled:
    """Returns what `compile_` makes of a graph: by prediction, or of two versions the one that is faster.

    compile_  compiles the graph. It sets `Trial.close` if the trial decides. It takes None if predictions decide
    """
    key = _key(module, values, options)
    if key is None:
        return compile_(None)
    made = dict[bool, tuple[Compiled, Callable[[], None]]]()

    def version(trial: Trial) -> Compiled:
        with withheld() as publish:
            compiled = compile_(trial)
        made[trial.sparse] = compiled, publish
        return compiled

    def gain() -> float:
        sparse = version(trial := Trial(sparse=True))
        return _gain(sparse, version(Trial(sparse=False)), values) if trial.close else math.inf

    wins = kept("whole-graphs", [key], gain, median, math.isfinite) >= 1
    if not made:
        return compile_(Trial(sparse=wins))
    compiled, publish = made[wins]
    publish()
    return compiled


def _key(module: fx.GraphModule, values: Sequence[Any], options: Options) -> str | None:
    """Returns the key of a graph's gain on disk. Returns None if the graph has no convolutions, or must not be timed.

    Similar sizes have one key, also if torch leaves them open, because a network often gets images of many sizes. Images with
    channels innermost have another key. Empty ones are not timed.
    """
    decides = options.min_gain > 0 and options.schedule == "auto" and options.dense != "eager" and not options.check
    able = decides and Budget.of(everything=False) is not None
    if not able or not any(map(_convolves, module.graph.nodes)) or any(map(_is_open, values)):
        return None
    inputs = Inputs.of(module, values)
    weights = weights_here(inputs)
    moving = [value for number, value in enumerate(values) if number not in inputs.statics]
    elements = sum(value.numel() for value in moving if isinstance(value, torch.Tensor))
    if weights is None or not elements:
        return None
    names = [node.name for node in module.graph.nodes if not isinstance(node.meta.get("example_value"), torch.SymInt)]
    strided = (value for value in values if isinstance(value, torch.Tensor) and value.layout is torch.strided)
    orders = [value.is_contiguous() for value in strided]
    return hashlib.sha256(f"{weights}\n{names}\n{orders}\n{round(math.log2(elements))}".encode()).hexdigest()


def _is_open(value: Any) -> bool:
    """Whether a value is not known."""
    number = isinstance(value, torch.SymFloat | torch.SymBool) or (isinstance(value, torch.SymInt) and hint(value) is None)
    return number or is_fake(value)


def _convolves(node: fx.Node) -> bool:
    return node.op == "call_function" and "conv" in str(node.target)


def _gain(sparse: Compiled, dense: Compiled, values: Sequence[Any]) -> float:
    """Returns how many times faster the sparse version is than the dense one."""
    from gossamer.backend.measuring.measure import fastest  # loads the compiler, which kept gains do not need

    given = [hint(value) if isinstance(value, torch.SymInt) else value for value in values]
    with disable_current_modes():
        us = fastest({"sparse": lambda: sparse(*given), "dense": lambda: dense(*given)}, torch.get_num_threads(), _ROUNDS)
    return us["dense"] / us["sparse"]
