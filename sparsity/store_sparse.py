"""`gossamer.store_sparse` makes the weights of a model under masks, or with zeros, store only their nonzeros. They train on.

layer.parametrizations.weight = [Mask(mask)], original    →    layer.weight = Parameter(SparseTensor, CSR)
layer.weight, dense, with zeros                           →    layer.weight = Parameter(SparseTensor, CSR)
experts.gate_up_proj, dense, with zeros                   →    experts.gate_up_proj = Parameter(SparseTensor, CSR each)
"""

import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gossamer.dialects.errors import OptionError
from gossamer.runtime.modules.when_held import say_held
from gossamer.runtime.packers.nonzeros import count_nonzeros
from gossamer.sparsity.pruning.choose_layers import Layers, chosen_layers
from gossamer.sparsity.pruning.mask import (
    is_masked,
    kept_by_masks,
    make_plain_within,
    parametrize_pruned,
    parametrized_tensors,
    uses_of,
)
from gossamer.sparsity.pruning.stored_experts import StoredExperts
from gossamer.sparsity.pruning.stored_layers import DENSEST, FORMAT, is_stored
from gossamer.sparsity.quantization.stored_tables import NONZEROS, TABLES, Shared, become_stored, why_no_table
from gossamer.sparsity.tensor.sparse_tensor import from_entries
from gossamer.sparsity.torch_functions.open_experts import expert_weights
from gossamer.sparsity.training.kept_steps import watch_optimizers

Model = TypeVar("Model", bound=nn.Module)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NAMED = 4  # in a message


def store_sparse(model: Model, *, densest: float = DENSEST, only: Layers | None = None, skip: Layers = ()) -> Model:
    """Replaces the pruned weights of a model's linear layers and experts by SparseTensor parameters, in place.

    It returns the model.

    Call it before you create the optimizer, because the parameters are new objects. Gradients, momentum and weight decay exist
    only for stored elements. So a training step costs time for the nonzeros only, and pruned weights stay zero with any
    optimizer. All torch optimizers with elementwise arithmetic work. In float32 and float64, a step of Adam, AdamW, SGD or
    Adagrad is one loop, as with `fused=True`.

    - A weight with a mask stores the elements that the mask keeps, also zeros, which train on. Others store their nonzeros.
    - The format is CSR with 32-bit integers: 8 bytes for each stored element, instead of 4 for each element of a dense weight.
    - Linear layers that share a weight and its mask still share it. A weight that another kind of module uses, such as an
      embedding, stays. If a layer has it under a mask, the layer stores the masked weight.
    - Experts of transformers store the weights of all experts, such as `gate_up_proj`, in one SparseTensor of the same shape.
      Their class changes; `gossamer.finalize` restores it.
    - Convolutions keep plain weights. A warning names those that are pruned.
    - Tables of nn.Embedding and nn.EmbeddingBag that `only` names, in float32 or less, become buffers: their nonzeros in
      float32, and a bit for each element. They have no gradient any more. See `StoredEmbeddingBag`.

    densest     weights with a larger share of nonzeros stay as they are
    only, skip  which layers, as for `sparsify`

    OptionError if no weight can be stored.
    """
    parametrize_pruned(model)
    stored = 0
    layers = chosen_layers(model, only, skip, _CONVOLUTIONS, tied=True, experts=True)
    stored += _store_tables(model, layers, densest) + _store_experts(model, layers, densest)
    chosen = [layer for layer in layers if isinstance(layer, nn.Linear)]
    plain = _left_plain(model, layers, densest)
    masks = {layer: kept_by_masks(layer) for layer in chosen if is_masked(layer)}
    masks = {layer: kept for layer, kept in masks.items() if count_nonzeros(kept) <= densest * kept.numel()}
    make_plain_within(model, [(layer, "weight") for layer in masks])
    uses, among_chosen = uses_of(model.modules()), uses_of(chosen)
    made = dict[int, list[tuple[Tensor, nn.Parameter]]]()  # by the id of a shared weight: where it was stored, and as what
    for layer in chosen:
        own = layer._parameters.get("weight")  # None under masks that keep too much, and under other parametrizations
        if is_stored(layer):
            stored += 1
            continue
        if own is None or uses[id(own)] > among_chosen[id(own)]:
            continue
        kept = masks.pop(layer) if layer in masks else own.detach() != 0
        if count_nonzeros(kept) > densest * kept.numel():
            continue
        sparse = next((each for where, each in made.get(id(own), ()) if torch.equal(where, kept)), None)
        if sparse is None:
            at = kept.nonzero().unbind(1)
            with torch.inference_mode(False):  # parameters that were made within it could never train
                sparse = nn.Parameter(from_entries(FORMAT, tuple(own.shape), at, own.detach()[at]), own.requires_grad)
            if uses[id(own)] > 1:
                made.setdefault(id(own), []).append((kept, sparse))
        layer._parameters = {"weight": sparse, **{n: p for n, p in layer._parameters.items() if n != "weight"}}
        stored += 1
    if not stored:
        of_others = f"; convolutions cannot be stored, and keep plain weights ({plain})" if plain else ""
        asked = " or table that was asked for" if any(isinstance(layer, TABLES) for layer in layers) else ""
        raise OptionError(
            f"no linear layer{asked} has {1 - densest:.0%} of zeros or more, so nothing is stored sparse: prune the model "
            f"first (gossamer.prune or gossamer.sparsify), or give a larger `densest`{of_others}"
        )
    if plain:
        warnings.warn(
            f"gossamer.store_sparse stores only linear layers and experts. Pruned convolutions keep plain weights: {plain}. "
            "Masks hold their zeros in training (gossamer.sparsify or torch.nn.utils.prune).",
            stacklevel=2,
        )
    watch_optimizers()
    say_held(model)
    return model


def _store_tables(model: nn.Module, layers: Iterable[nn.Module], densest: float) -> int:
    """Stores the tables among the layers that have few nonzeros. Returns how many."""
    tables: list[Any] = [each for each in layers if not why_no_table(each)]
    tables = [each for each in tables if each.weight.dtype is not torch.float64]
    tables = [each for each in tables if count_nonzeros(each.weight.detach()) <= densest * each.weight.numel()]
    make_plain_within(model, [(each, "weight") for each in tables if parametrize.is_parametrized(each, "weight")])
    shared: Shared = {}
    for table in tables:
        become_stored(table, NONZEROS, shared)
    return len(tables)


def _store_experts(model: nn.Module, layers: Iterable[nn.Module], densest: float) -> int:
    """Stores the weights of experts among the layers that have few nonzeros. Returns how many layers are stored."""
    experts = [layer for layer in layers if expert_weights(layer)]
    uses, among, made = uses_of(model.modules()), uses_of(experts), dict[int, nn.Parameter]()
    found = dict[nn.Module, dict[str, Tensor]]()  # where the masks of each keep elements
    for each in (each for each in experts if not is_stored(each)):
        masked = {name: is_masked(each, name) for name in expert_weights(each)}
        own = [each._parameters.get(name) for name, under_masks in masked.items() if not under_masks]
        if {*parametrized_tensors(each)} - {*masked}:
            continue  # with another class, it would lose the biases that are computed
        if any(type(weight) is not nn.Parameter or uses[id(weight)] > among[id(weight)] for weight in own):
            continue
        kept = {
            name: kept_by_masks(each, name) if under_masks else getattr(each, name).detach() != 0
            for name, under_masks in masked.items()
        }
        if sum(map(count_nonzeros, kept.values())) > densest * sum(where.numel() for where in kept.values()):
            continue
        found[each] = {name: where for name, where in kept.items() if masked[name]}
    make_plain_within(model, [(each, name) for each, masks in found.items() for name in masks])
    for each, masks in found.items():
        plain = {name: getattr(each, name).detach() != 0 for name in expert_weights(each) if name not in masks}
        StoredExperts.become(each, plain | masks, made)
    return sum(map(is_stored, experts))


def _left_plain(model: nn.Module, layers: Iterable[nn.Module], densest: float) -> str:
    """Returns the names of pruned convolutions for a message: those with at most a share `densest` of nonzeros."""
    names = {module: name for name, module in model.named_modules()}
    found = [
        names.get(layer, type(layer).__name__)
        for layer in layers
        if isinstance(layer, _CONVOLUTIONS) and count_nonzeros(layer.weight.detach()) <= densest * layer.weight.numel()
    ]
    return ", ".join(found[:_NAMED]) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
