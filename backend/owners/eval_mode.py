"""Finds out whether a graph belongs to modules in eval mode although gradients are enabled.

    model.eval()
    y = model(x)                gradients are enabled by default, but code in eval mode hardly ever calls backward

The mode of the modules becomes a guard, so that Dynamo recompiles after `train()`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from gossamer.backend.owners.owners import Owners
from gossamer.runtime.torch_internals import (
    AttrSource,
    GuardBuilder,
    dynamo_config,
    install_guard,
    is_fake,
    is_traceable_wrapper_subclass,
    off,
)
from gossamer.runtime.torch_names import EVAL


def is_in_eval_mode(owners: Owners, inputs: Sequence[Any]) -> bool:
    """Whether gradients are enabled, an input requires them, and all modules that own inputs (at least one) are in eval mode.

    Installs the guards that this answer depends on. Call this while Dynamo compiles the frame of the graph.
    False for inputs that are not plain tensors with values and versions.
    """
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return False
    if any(is_fake(each) or each.is_inference() or is_traceable_wrapper_subclass(each) for each in tensors):
        return False
    if off(EVAL) or dynamo_config.compiled_autograd:
        return False
    modes = (AttrSource(source, "training") for source, _ in owners.outermost)
    install_guard(*(mode.make_guard(GuardBuilder.CONSTANT_MATCH) for mode in modes))
    return bool(owners.all) and not any(module.training for _, module in owners.all)
