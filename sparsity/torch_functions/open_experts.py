"""Makes experts of transformers call linear layers. Normally the weights of all experts are parts of one parameter.

gate_up_proj [experts, 2 hidden, columns]    →    experts.3.gate_up_proj, a linear layer with the weight gate_up_proj[3]
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_DOWN = "down_proj"
_FIRST = ("gate_up_proj", "up_proj")


def expert_weights(module: nn.Module) -> tuple[str, str] | tuple[()]:
    """Returns the names of the first and the second weight, [experts, rows, columns] each, of a module of experts.

    Returns () for modules other than those of transformers, and for experts with other work between or after their products.
    """
    known = all(hasattr(module, name) for name in ("_apply_gate", "has_gate", "has_bias", "is_transposed"))
    if not known or getattr(module, "has_post_expert_norm", False):
        return ()
    first = _FIRST[0 if module.has_gate else 1]
    weights = [getattr(module, name, None) for name in (first, _DOWN)]
    return (first, _DOWN) if all(isinstance(w, Tensor) and w.dim() == 3 and w.is_floating_point() for w in weights) else ()


@contextmanager
def open_experts(model: nn.Module) -> Iterator[None]:
    """Gives experts their products as linear layers within the context, and makes them call these.

    Hooks see the inputs of each expert. Changes of the weights reach the parameters that contain them. Experts with masked,
    computed or sharded parameters stay as they are.
    """
    made: list[tuple[nn.Parameter, Tensor]] = []
    opened = {module: vars(module).get("forward") for module in model.modules() if _can_be_opened(module)}
    for experts in opened:
        _open(experts, made)
    try:
        yield
    finally:
        for experts, forward in opened.items():
            del vars(experts)["forward"]
            if forward is not None:
                vars(experts)["forward"] = forward
            for name in [name for name in experts._modules if name.isdigit()]:
                del experts._modules[name]
        with torch.no_grad():
            for parameter, part in made:
                if parameter.data_ptr() != part.data_ptr():
                    part.copy_(parameter)


def are_open(module: nn.Module) -> bool:
    """Whether a module has experts that `open_experts` has opened."""
    return bool(expert_weights(module)) and "0" in module._modules


def _can_be_opened(module: nn.Module) -> bool:
    names = expert_weights(module)
    return bool(names) and all(type(module._parameters.get(name)) is nn.Parameter for name in names)


def _open(experts: nn.Module, made: list[tuple[nn.Parameter, Tensor]]) -> None:
    count = len(experts.get_parameter(_DOWN))
    for number in range(count):
        expert = nn.Module()
        for name in expert_weights(experts):
            weight = experts.get_parameter(name)
            part = weight.detach()[number].t() if experts.is_transposed else weight.detach()[number]
            made.append((nn.Parameter(part, weight.requires_grad), part))
            linear = nn.Linear(part.shape[1], part.shape[0], bias=False, device="meta")
            linear.weight = made[-1][0]
            expert.add_module(name, linear)
        experts.add_module(str(number), expert.train(experts.training))
    vars(experts)["forward"] = partial(_forward, experts)


def _forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes the experts one after the other. Experts without tokens get no rows."""
    out = torch.zeros_like(hidden_states)
    first, second = _FIRST[0 if experts.has_gate else 1], _DOWN
    for number in range(len(experts.get_parameter(second))):
        tokens, slots = torch.where(top_k_index == number)
        sums = getattr(experts, str(number)).get_submodule(first)(hidden_states[tokens])
        if experts.has_bias:
            sums = sums + getattr(experts, f"{first}_bias")[number]
        hidden = experts._apply_gate(sums) if experts.has_gate else experts.act_fn(sums)
        rows = getattr(experts, str(number)).get_submodule(second)(hidden)
        if experts.has_bias:
            rows = rows + getattr(experts, f"{second}_bias")[number]
        out.index_add_(0, tokens, (rows * top_k_weights[tokens, slots, None]).to(out.dtype))
    return out
