"""`gossamer.finalize` makes a sparse model a plain PyTorch model again, so that programs without Gossamer can load it.

layer.parametrizations.weight = [Mask(mask)], original     →    layer.weight, dense, with zeros
layer.parametrizations.weight = [one of the user]          →    layer.weight, if it sets elements to zero
layer.weight_orig, layer.weight_mask (torch.nn.utils.prune) →   layer.weight
PackedLinear                                               →    nn.Linear
layer.weight, a SparseTensor (gossamer.store_sparse)       →    layer.weight
table.weight_nonzeros, table.weight_bits (the same)        →    table.weight
"""

from typing import TypeVar

from torch import nn

from gossamer.sparsity.adjacency import leave_sparse
from gossamer.sparsity.packed_linear import PackedLinear
from gossamer.sparsity.pruning.mask import make_plain_within, masked_tensors, parametrize_pruned
from gossamer.sparsity.pruning.stored_layers import make_dense
from gossamer.sparsity.quantization.stored_tables import become_floats
from gossamer.sparsity.training.latent import remove_backward_mask

Model = TypeVar("Model", bound=nn.Module)


def finalize(model: Model) -> Model:
    """Makes the weights of a sparse model ordinary parameters with zeros, in place, and returns the model.

    Parameters get the names of the dense model again. So files of `save_pretrained`, state dicts and pickles load without
    Gossamer.

    It undoes `sparsify`, `prepare`, `store_sparse`, torch.nn.utils.prune, torch.ao.pruning, recipes of `train_sparse` (on a
    copy of the model), and parametrizations of your own that make elements zero. The zeros stay, and the model computes the
    same.

    `torch.compile(model, backend="sparse")` still finds the zeros.

    Parameters stay the same objects, except packed and stored weights. A masked weight that another module uses without the
    mask, or with another mask, is no longer shared. SparseTensors that are no weight of a linear layer stay.
    """
    parametrize_pruned(model)
    make_plain_within(model, [(module, name) for module in model.modules() for name in masked_tensors(module)])
    for module in model.modules():
        remove_backward_mask(module)
        if isinstance(module, PackedLinear):
            module.unpack()
    make_dense(model)
    become_floats(model)
    leave_sparse(model)
    return model
