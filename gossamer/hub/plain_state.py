"""Computes the state dict that a sparse model would have with plain weights and zeros. Libraries without Gossamer load it.

layer.parametrizations.weight.original, .0.mask    →    layer.weight
layer.weight, a SparseTensor                       →    layer.weight, dense
layer.weight_orig, layer.weight_mask               →    layer.weight
layer.weight_int8, layer.weight_scale              →    layer.weight, as floats
table.weight_nonzeros, table.weight_bits           →    table.weight
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gossamer.sparsity.pruning.mask import Mask, is_masked, pruning_hooks
from gossamer.sparsity.pruning.sparse_low_rank import SparseLowRank
from gossamer.sparsity.quantization.grouped_linear import GroupedLinear
from gossamer.sparsity.quantization.quantized_experts import PARTS, QuantizedExperts
from gossamer.sparsity.quantization.quantized_linear import QuantizedLinear
from gossamer.sparsity.quantization.stored_tables import StoredEmbedding, StoredEmbeddingBag
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

_Computed = tuple[str, Tensor, tuple[str, ...]]


@torch.no_grad()
def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state of a model, and does not change the model. Plain tensors are those of the model, not copies."""
    state = dict(model.state_dict())
    dense: dict[int, Tensor] = {}
    computed: dict[int, list[_Computed]] = {}  # once for each table, so that shared tables stay shared
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        number = id(module.stored[0] if isinstance(module, StoredEmbedding | StoredEmbeddingBag) else module)
        if number not in computed:
            computed[number] = list(_computed(module))
        for part, value, stands_for in computed[number]:
            gone = [key for key in state if key.startswith(tuple(prefix + each for each in stands_for))]
            for key in gone:
                del state[key]
            state[f"{prefix}{part}"] = value.detach()
        for part, parameter in module._parameters.items():
            if isinstance(parameter, SparseTensor):
                if id(parameter) not in dense:
                    dense[id(parameter)] = parameter.detach().to_dense()
                state[f"{prefix}{part}"] = dense[id(parameter)]
    return state


def is_held(model: nn.Module) -> bool:
    """Whether Gossamer has put weights of a model under masks, or stores their nonzeros alone."""
    return any(
        isinstance(module, Mask | StoredEmbedding | StoredEmbeddingBag)
        or any(isinstance(parameter, SparseTensor) for parameter in module._parameters.values())
        for module in model.modules()
    )


def _made_sparse(module: nn.Module) -> list[str]:
    """Returns the tensors with a parametrization that makes them sparse. A model may have others of its own, such as norms."""
    chains: Any = module.parametrizations if parametrize.is_parametrized(module) else {}
    of_both = lambda chain: any(isinstance(each, SparseLowRank) for each in chain)
    return [name for name, chain in chains.items() if is_masked(module, name) or of_both(chain)]


def _computed(module: nn.Module) -> Iterator[_Computed]:
    """Yields the tensors that a module computes from others, by name, and the prefixes of the names of these others."""
    if isinstance(module, QuantizedLinear | GroupedLinear):
        yield "weight", module.weight, ("weight_int8", "weight_scale", "weight_groups", "input_")
    if isinstance(module, StoredEmbedding | StoredEmbeddingBag):
        yield "weight", module.weight, module.names
    if isinstance(module, QuantizedExperts):
        for name in module.names:
            yield name, getattr(module, name), tuple(f"{name}_{part}" for part in PARTS)
    for part in _made_sparse(module):
        yield part, getattr(module, part), (f"parametrizations.{part}.",)
    for hook in pruning_hooks(module).values():
        part = hook._tensor_name
        yield part, hook.apply_mask(module), (f"{part}_orig", f"{part}_mask")  # the attribute is of the last forward pass
