"""`gossamer.finalize`: a sparse model as plain PyTorch, to be saved and loaded where nobody knows of masks.

layer.parametrizations.weight = [Mask(mask)], original     →    layer.weight, dense, with zeros
layer.weight_orig, layer.weight_mask (torch.nn.utils.prune) →   layer.weight
PackedLinear                                               →    nn.Linear
layer.weight, a SparseTensor (gossamer.store_sparse)       →    layer.weight
"""

from collections import Counter
from typing import TypeVar

from torch import nn
from torch.nn.utils import parametrize

from gossamer.sparsity.adjacency import leave_sparse
from gossamer.sparsity.packed_linear import PackedLinear
from gossamer.sparsity.pruning.mask import is_mask, parametrize_pruned
from gossamer.sparsity.pruning.stored_layers import make_dense

Model = TypeVar("Model", bound=nn.Module)


def finalize(model: Model) -> Model:
    """Make a sparse model plain: its weights are parameters with zeros, under the names that they had; in place, returned.

    Undoes `sparsify` and `prepare` but for the zeros, and does the same for torch.nn.utils.prune and torch.ao.pruning. The
    state dict has the names of the dense model, so that `save_pretrained`, `state_dict` and pickles lose nothing when they
    are loaded without Gossamer. It computes what it did before, and `torch.compile(model, backend="sparse")` finds the zeros.
    Parameters stay the same objects, except for packed and stored weights, and for a masked weight that another module uses
    without the mask, which is no longer shared. SparseTensors that are no weight of a linear layer stay.
    """
    parametrize_pruned(model)
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    masked = Counter(id(module.parametrizations[name].original) for module, name in _masked(model))  # type: ignore[index, union-attr]
    for module, name in _masked(model):
        kept: nn.Parameter = module.parametrizations[name].original  # type: ignore[index, union-attr]
        shared = uses[id(kept)] > masked[id(kept)]
        value = getattr(module, name).detach().clone() if shared else None
        parametrize.remove_parametrizations(module, name, leave_parametrized=not shared)
        if value is not None:
            setattr(module, name, nn.Parameter(value, kept.requires_grad))
        module._parameters = {name: module._parameters[name], **module._parameters}  # in front of a bias, as it was
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.unpack()
    make_dense(model)
    leave_sparse(model)
    return model


def _masked(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules that have a tensor under a mask, and its name."""
    found = []
    for module in model.modules():
        if parametrize.is_parametrized(module):
            parametrizations: nn.ModuleDict = module.parametrizations  # type: ignore[assignment]
            found += [
                (module, name) for name, chain in parametrizations.items() if any(is_mask(each) for each in chain.children())
            ]
    return found
