"""Views layers as matrices: the weight [outputs, inputs] of a linear layer or convolution, and the rows of its inputs."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gossamer.dialects.errors import OptionError
from gossamer.sparsity.pruning.batches import rows_that_count
from gossamer.sparsity.pruning.choose_layers import Layers, chosen_layers, has_weight, is_transposed, none_chosen, weight_names
from gossamer.sparsity.pruning.mask import has_one_original, is_masked, is_pruned_by_hook, original_of
from gossamer.sparsity.pruning.norm_hooks import remover_of_norm
from gossamer.sparsity.pruning.stored_layers import is_stored
from gossamer.sparsity.pruning.unfolding import Convolution, patches
from gossamer.sparsity.torch_functions.open_experts import expert_weights
from gossamer.sparsity.torch_functions.plain_model import plain_model, plain_name


@dataclass(eq=False)
class Layer:
    """A layer to be pruned, and its name in the model. Attention of torch.nn has a Layer for each of its weights.

    sharers  other layers with the same weight, if `once_each` has found them
    """

    name: str
    module: nn.Module = field(repr=False)
    weight_name: str = "weight"
    sharers: "list[Layer]" = field(default_factory=list, repr=False)

    @property
    def holders(self) -> list[tuple[nn.Module, str]]:
        """The modules that have the weight, and its name in each."""
        return [(each.module, each.weight_name) for each in (self, *self.sharers)]

    @property
    def weight(self) -> Tensor:
        """The weight as a matrix [outputs, inputs]: a view, or a copy if the weight is not contiguous."""
        weight = self.parameter.detach()
        return weight.t() if is_transposed(self.module) else weight.flatten(1)

    @property
    def bias(self) -> Tensor | None:
        """The bias, None if there is none. One that is computed from others counts as none, because it cannot be written."""
        computed = is_pruned_by_hook(self.module, "bias") or parametrize.is_parametrized(self.module, "bias")
        bias = None if computed else getattr(self.module, "bias", None)
        return bias.detach() if isinstance(bias, Tensor) else None

    def write(self, weight: Tensor, bias: Tensor | None) -> None:
        """Puts another weight [outputs, inputs] and bias into the module."""
        self.restore((weight.t() if is_transposed(self.module) else weight).reshape(self.parameter.shape), bias)

    def parameters(self, *, copy: bool = True) -> tuple[Tensor, Tensor | None]:
        """Returns the data of the weight in the module's own shape, and of the bias, for `hold` and `restore`."""
        weight, bias = self.parameter.data, self.bias
        return (weight.clone(), None if bias is None else bias.clone()) if copy else (weight, bias)

    def restore(self, weight: Tensor, bias: Tensor | None) -> None:
        """Copies these tensors, of the module's own shapes, into the layer's parameters."""
        with torch.no_grad():
            self.parameter.copy_(weight)
            if bias is not None:
                self.module.bias.copy_(bias)  # type: ignore[operator]

    def hold(self, weight: Tensor, bias: Tensor | None) -> None:
        """Makes these tensors the data of the layer's parameters, for a time. `restore` is for good."""
        self.parameter.data = weight
        if bias is not None:
            self.module.bias.data = bias

    def rows(self, x: Tensor, tokens: Tensor | None) -> Tensor:
        """Returns the rows [samples, inputs] that the weight is multiplied with, of the tokens that count.

        For a convolution of several groups they are [groups, samples, inputs].
        """
        return patches(self.module, x) if isinstance(self.module, Convolution) else rows_that_count(x, tokens)

    @property
    def parameter(self) -> nn.Parameter:
        """The weight in the module's own shape."""
        return getattr(self.module, self.weight_name)


def layers_of(
    model: nn.Module, only: Layers | None, skip: Layers, kinds: tuple[type[nn.Module], ...] = (), *, stored: bool = False,
    masked: bool = False, experts: bool = False,
) -> list[Layer]:  # fmt: skip
    """Returns the layers to prune. Without `only` these are linear layers, modules of other `kinds`, and `experts` if True.

    OptionError for layers that cannot be pruned. Layers with stored weights, or under masks, are refused unless `stored` or
    `masked` is True.
    """
    chosen = chosen_layers(model, only, skip, kinds, experts=experts)
    names = {id(module): plain_name(name) for name, module in plain_model(model).named_modules()}
    layers = [
        Layer(names[id(module)] if weight == "weight" else f"{names[id(module)]}.{weight}".lstrip("."), module, weight)
        for module in chosen
        for weight in weight_names(module)
        if getattr(module, weight).numel()
    ]
    if not layers:
        others = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear) and not has_weight(m)})
        without = f"the weight of a {' or a '.join(others)} is not a parameter"
        why = (
            without
            if others
            else f"{none_chosen(model, only, skip)}. Convolutions are taken by name or type: only=torch.nn.Conv2d"
        )
        raise OptionError(f"there is no layer to prune: {why}")
    for layer in layers:
        held = layer.module, layer.weight_name
        can_be_plain = masked and is_masked(*held) and has_one_original(*held)
        if not (can_be_plain or (stored and is_stored(layer.module))):
            _check(layer)
    return layers


def once_each(layers: Iterable[Layer]) -> list[Layer]:
    """Returns the layers, but of those that share a weight only the first, with the others as its `sharers`."""
    found: dict[int, Layer] = {}
    for layer in layers:
        first = found.setdefault(id(original_of(layer.module, layer.weight_name)), layer)
        if first is not layer:
            first.sharers.append(layer)
    return list(found.values())


def _check(layer: Layer) -> None:
    module = layer.module
    if is_masked(module, layer.weight_name) or is_pruned_by_hook(module, layer.weight_name):
        raise OptionError(f"'{layer.name}' has a mask: gossamer.finalize(model) makes it plain first")
    remover = remover_of_norm(module)
    if remover is not None or parametrize.is_parametrized(module, layer.weight_name):
        call = remover.__name__ if remover is not None else "parametrize.remove_parametrizations"
        raise OptionError(
            f"the weight of '{layer.name}' is computed from others: {call}(layer, '{layer.weight_name}') of torch.nn.utils "
            "makes it plain first, or `skip` it"
        )
    if is_stored(module):
        raise OptionError(f"'{layer.name}' stores only its nonzeros: call gossamer.finalize(model) first, which makes it plain")
    weight = layer.parameter
    if weight.is_meta or not weight.is_floating_point():
        raise OptionError(
            f"the weight of '{layer.name}' is {weight.dtype} on {weight.device}, must be floats in memory: load or `skip` it"
        )
    if not (
        isinstance(module, nn.Linear | nn.MultiheadAttention | Convolution) or is_transposed(module) or expert_weights(module)
    ):
        raise OptionError(
            f"'{layer.name}' is a {type(module).__name__}: linear layers, Conv1d, Conv2d and Conv3d can be pruned; `skip` it"
        )
