"""Computes the state dict that a sparse model would have with plain weights and zeros. Libraries without Gossamer load it.

layer.parametrizations.weight.original, .0.mask    →    layer.weight
layer.weight, a SparseTensor                       →    layer.weight, dense
layer.weight_orig, layer.weight_mask               →    layer.weight
layer.weight_int8, layer.weight_scale              →    layer.weight, as floats
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gossamer.sparsity.pruning.mask import is_pruned_by_hook
from gossamer.sparsity.quantization.grouped_linear import GroupedLinear
from gossamer.sparsity.quantization.quantized_linear import QuantizedLinear
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor


@torch.no_grad()
def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state of a model, and does not change the model. Plain tensors are those of the model, not copies."""
    state = dict(model.state_dict())
    dense: dict[int, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for part, stands_for in _computed(module):
            gone = [key for key in state if key.startswith(tuple(prefix + each for each in stands_for))]
            for key in gone:
                del state[key]
            state[f"{prefix}{part}"] = getattr(module, part).detach()
        for part, parameter in module._parameters.items():
            if isinstance(parameter, SparseTensor):
                if id(parameter) not in dense:
                    dense[id(parameter)] = parameter.detach().to_dense()
                state[f"{prefix}{part}"] = dense[id(parameter)]
    return state


def _computed(module: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the tensors that a module computes from others, and the prefixes of the names of these others."""
    if isinstance(module, QuantizedLinear | GroupedLinear):
        yield "weight", ("weight_int8", "weight_scale", "weight_groups", "input_")
    if parametrize.is_parametrized(module):
        for part in module.parametrizations:  # type: ignore[union-attr]
            yield str(part), (f"parametrizations.{part}.",)
    elif is_pruned_by_hook(module):
        yield "weight", ("weight_orig", "weight_mask")
