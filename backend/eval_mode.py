"""Whether a graph belongs to modules in eval mode, although its gradients are enabled.

    model.eval()
    y = model(x)                gradients are on, as ever, and hardly anybody calls backward

Dynamo does not tell a backend in which mode a module is. It does say where each parameter comes from: `L['self'].fc.weight`.
So the modules are looked up where Dynamo looks, and their mode becomes a guard. A call after `train()` compiles anew.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.names import module_of, outward
from gossamer.backend.report.graph_breaks import compiled_frame
from gossamer.runtime.torch_internals import (
    EVAL,
    AttrSource,
    GuardBuilder,
    dynamo_config,
    install_guard,
    is_fake,
    is_traceable_wrapper_subclass,
    off,
)


def modules_in_eval_mode(graph: fx.Graph, inputs: Sequence[Any]) -> list[torch.nn.Module]:
    """The outermost modules that own inputs, if gradients are enabled, an input requires them, and all owners are in eval mode.

    Installs the guards that this answer depends on. To be asked while Dynamo compiles the frame of `graph`.
    Otherwise, and for inputs that are not plain tensors with values and versions, the list is empty.
    """
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return []
    if any(is_fake(each) or each.is_inference() or is_traceable_wrapper_subclass(each) for each in tensors):
        return []
    if off(EVAL) or dynamo_config.compiled_autograd:
        return []
    owners = _modules(graph)
    outermost = [(source, module) for source, module in owners.values() if not any(s.name in owners for s in _outside(source))]
    install_guard(*(AttrSource(source, "training").make_guard(GuardBuilder.CONSTANT_MATCH) for source, _ in outermost))
    return [] if any(module.training for _, module in owners.values()) else [module for _, module in outermost]


def _modules(graph: fx.Graph) -> dict[str, tuple[Any, torch.nn.Module]]:
    """The modules that the inputs of a graph lie in, at any depth, each by its source's name and with its source."""
    frame = compiled_frame()
    found, cache = dict[str, tuple[Any, torch.nn.Module]](), dict[Any, Any]()
    if frame is None:  # not a graph of Dynamo's
        return found
    scope = {"G": frame.f_globals, "L": frame.f_locals}
    for node in graph.find_nodes(op="placeholder"):
        for source in outward(getattr(node.meta.get("grapharg"), "source", None)):
            if source.name in found:
                break
            if (module := module_of(source, scope, cache)) is not None:
                found[source.name] = source, module
    return found


def _outside(source: Any) -> Iterator[Any]:
    """What a source is taken from; some sources only say again, more precisely, what another one is."""
    return (each for each in outward(source) if each.name != source.name)
