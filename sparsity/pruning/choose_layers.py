"""Chooses the layers of a model for `only` and `skip` of `sparsify`, `prune` and others: by name, pattern, type or function.

only="encoder.*", skip=["*.gate", nn.Bilinear, lambda name, layer: layer.out_features < 64]
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.utils import parametrize

from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import did_you_mean
from gossamer.sparsity.pruning.mask import is_pruned_by_hook, original_of, uses_of
from gossamer.sparsity.pruning.norm_hooks import remover_of_norm
from gossamer.sparsity.torch_functions.check_model import check_model
from gossamer.sparsity.torch_functions.open_attention import PROJECTIONS, is_open
from gossamer.sparsity.torch_functions.open_experts import are_open, expert_weights
from gossamer.sparsity.torch_functions.plain_model import plain_model, plain_name

Choice = str | re.Pattern[str] | type[nn.Module] | Callable[[str, nn.Module], bool]
Layers = Choice | Sequence[Choice]

_MOST_NAMES = 12  # in a message


def chosen_layers(
    model: nn.Module, only: Layers | None, skip: Layers, kinds: tuple[type[nn.Module], ...] = (), tied: bool = False,
    experts: bool = False,
) -> list[nn.Module]:  # fmt: skip
    """Returns the layers with weights that `only` takes and `skip` does not take. Attention of torch.nn has several weights.

    - Without `only` these are linear layers and modules of the other `kinds`. If asked for, also `experts` of transformers,
      whose weights are [experts, rows, columns], and `tied` layers, which share their weight.
    - A name in `only` may be that of any layer with a weight. A pattern takes linear layers, experts and convolutions of 1 to 3
      dimensions.
    OptionError if no layer has the name, or none fits the pattern.
    """
    check_model(model)
    taken, left = _listed(only), _listed(skip)
    types = (*kinds, *(choice for choice in taken if isinstance(choice, type)))
    modules = {plain_name(name): module for name, module in plain_model(model).named_modules()}
    weighted = {name: module for name, module in modules.items() if _is_linear(module) or weight_names(module)}
    wanted = lambda module: _is_linear(module) or isinstance(module, types) or (experts and expert_weights(module))
    layers = {name: module for name, module in weighted.items() if wanted(module) or _is_named(taken, name, module)}
    for choice in (*taken, *left):
        if isinstance(choice, str | re.Pattern) and not any(_fits(choice, name, layer) for name, layer in weighted.items()):
            raise OptionError(_no_layer(choice, modules, weighted))
    if only is None and not tied:
        sharing = set(_tied(model))
        layers = {name: layer for name, layer in layers.items() if layer not in sharing}
    elif only is not None:
        layers = {name: layer for name, layer in layers.items() if any(_fits(choice, name, layer) for choice in taken)}
    return [layer for name, layer in layers.items() if not any(_fits(choice, name, layer) for choice in left)]


def none_chosen(model: nn.Module, only: Layers | None, skip: Layers) -> str:
    """Returns why `chosen_layers` found none, for a message: what the model has instead."""
    if only is not None or _listed(skip):
        return "no layer is left by `only` and `skip`"
    others = Counter(type(module).__name__ for module in weight_holders(model))
    has = ", ".join(f"{count} {kind}" for kind, count in others.items())
    return f"without `only` it takes linear layers that do not share their weight; this model has {has or 'no weights'}"


def weight_holders(model: nn.Module, skip: Layers = ()) -> list[nn.Module]:
    """Returns the modules with a weight of two dimensions or more, and all linear layers, without those that `skip` names.

    Functions in `skip` are called with linear layers alone.
    """
    left, found = _listed(skip), []
    for name, module in plain_model(model).named_modules():
        held = any(p is not None and p.dim() >= 2 for p in module._parameters.values())
        asked = [c for c in left if isinstance(c, str | re.Pattern | type) or _is_linear(module)]
        if isinstance(module, parametrize.ParametrizationList) or any(_fits(c, plain_name(name), module) for c in asked):
            continue
        if held or weight_names(module) or isinstance(module, nn.Linear):
            found.append(module)
    return found


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer is `Conv1D` of transformers: linear, with a weight [inputs, outputs]. Checked by name and attributes."""
    parts = {type(layer).__name__, *(kind.__name__ for kind in type(layer).__mro__)}
    return "Conv1D" in parts and hasattr(layer, "nf") and has_weight(layer) and layer.weight.dim() == 2  # type: ignore[operator]


def weight_names(layer: nn.Module) -> tuple[str, ...]:
    """Returns the names of a layer's weights: one, or the projections of attention of torch.nn, or those of experts.

    Attention and experts that `called_openly` has opened have none, because their projections are layers then.
    """
    if has_weight(layer):
        return ("weight",)
    if (experts := expert_weights(layer)) and not are_open(layer):
        return experts
    if not isinstance(layer, nn.MultiheadAttention) or is_open(layer):
        return ()
    names = (f"{each}_weight" for each in ("in_proj", *PROJECTIONS))
    return tuple(name for name in names if isinstance(getattr(layer, name, None), Tensor))


def has_weight(layer: nn.Module) -> bool:
    """Whether a layer has a `weight` of two dimensions or more: a parameter, masked or not, or computed from parameters."""
    held = isinstance(layer._parameters.get("weight"), nn.Parameter) or parametrize.is_parametrized(layer, "weight")
    by_hook = is_pruned_by_hook(layer) or remover_of_norm(layer) is not None
    return (held or by_hook) and layer.weight.dim() >= 2  # type: ignore[operator]


def _is_linear(layer: nn.Module) -> bool:
    return (isinstance(layer, nn.Linear) and has_weight(layer)) or is_transposed(layer)


def _tied(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules that share a weight with another module, under a mask or not."""
    uses = uses_of(model.modules())
    tied = lambda module: any(uses[id(original_of(module, name))] > 1 for name in weight_names(module))
    return filter(tied, model.modules())


def _is_named(taken: tuple[Choice, ...], name: str, layer: nn.Module) -> bool:
    """Whether `only` takes a layer that is not linear: by its name, or by a pattern if it is a convolution or experts."""
    by_pattern = isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) or bool(expert_weights(layer))
    patterns = any(isinstance(c, str | re.Pattern) and _fits(c, name, layer) for c in taken)
    return name in taken or (by_pattern and patterns)


def _no_layer(choice: str | re.Pattern[str], modules: dict[str, nn.Module], weighted: dict[str, nn.Module]) -> str:
    """Returns the message for a name or pattern that no layer has, or no layer with a weight."""
    wanted = choice if isinstance(choice, str) else choice.pattern
    others = [type(module).__name__ for name, module in modules.items() if name and _fits(choice, name, module)]
    hint = f" (that is a {others[0]}; '{wanted}.*' names the layers in it)" if others else did_you_mean(wanted, weighted)
    more = f" and {len(weighted) - _MOST_NAMES} more" if len(weighted) > _MOST_NAMES else ""
    names = ", ".join([*weighted][:_MOST_NAMES]) or "none"
    return f"no layer with a weight is called '{wanted}'{hint}: there are {names}{more}"


def _listed(layers: Layers | None) -> tuple[Choice, ...]:
    if layers is None:
        return ()
    return (layers,) if isinstance(layers, str | re.Pattern | type) or callable(layers) else tuple(layers)


def _fits(choice: Choice, name: str, layer: nn.Module) -> bool:
    if isinstance(choice, str):
        return fnmatchcase(name, choice)
    if isinstance(choice, re.Pattern):
        return choice.fullmatch(name) is not None
    return isinstance(layer, choice) if isinstance(choice, type) else choice(name, layer)
