"""`gossamer.prepare` rewrites code of a sparse model that torch.compile cannot trace, and code that hides sparsity from it.

    prune.l1_unstructured(layer, "weight", 0.9)        layer.weight = weight_orig * weight_mask, by a hook at every call
    model = gossamer.prepare(model)                →   layer.parametrizations.weight = [Mask(mask)], original = weight_orig

A hook writes the masked weight back into the module. A parametrization is read, never written, and its mask also reaches the
gradient.
"""

from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gossamer.runtime.packers.nonzeros import count_nonzeros
from gossamer.sparsity.adjacency import take_sparse
from gossamer.sparsity.packed_linear import PackedLinear
from gossamer.sparsity.pruning.mask import Mask, is_of_torch_ao, make_plain_within, masked_tensors, parametrize_pruned, uses_of
from gossamer.sparsity.pruning.stored_layers import make_dense
from gossamer.sparsity.quantization.dynamic_layers import take_dynamic

Model = TypeVar("Model", bound=nn.Module)


def prepare(model: Model, *, free_dense: bool = False) -> Model:
    """Rewrites the parts of a sparse model that torch.compile cannot trace. Changes the model in place and returns it.

    | found in the model | becomes |
    |---|---|
    | pruning by `torch.nn.utils.prune` | a mask parametrization |
    | the mask of a sparsifier of torch.ao.pruning, before its `squash_mask` | a mask parametrization |
    | torch.sparse tensors in parameters, buffers, attributes, lists and dictionaries | SparseTensors |
    | torch.sparse tensors as arguments of calls | SparseTensors, at every call |
    | layers of `torch.ao.quantization.quantize_dynamic` with a tenth of zeros or more | layers of `gossamer.quantize` |

    - Masks: parameters stay the same objects, so an optimizer that holds them goes on. In the state dict `weight_orig` becomes
      `parametrizations.weight.original`, and `weight_mask` becomes `parametrizations.weight.0.mask`.
    - torch.sparse: the state dict keeps its names, and old checkpoints load. Layers of PyTorch Geometric take an adjacency,
      whose rows are targets, in place of an `edge_index`.
    - quantize_dynamic: int8 weights and scales stay the same. Inputs are quantized token by token, which loses less. In the
      state dict `_packed_params` becomes `weight_int8`, `weight_scale` and `bias`, so load old checkpoints before `prepare`.
      Dynamo breaks the graph at layers with fewer zeros.
    - Attention and transformer layers of torch.nn: their fused inference path makes nested tensors of padded batches. `prepare`
      turns it off for the process (`torch.backends.mha.set_fastpath_enabled(False)`).
    - The signature of `forward` stays, because a Trainer of Hugging Face reads it. `torch.export` works.

    `finalize` undoes all of this, except for the zeros.

    free_dense  for inference: frees the dense weight of every linear layer with a tenth of zeros or more, once a compiled graph
                has packed it. Masks are multiplied in. Such a weight is no parameter any more and has no gradient.
                `layer.weight` and the state dict return dense copies under the usual names, and checkpoints load as before. A
                call without torch.compile, or a layer that stays dense, rebuilds the weight. Shared weights stay.
    """
    parametrize_pruned(model)
    for module in model.modules():
        if is_of_torch_ao(module):
            module.__class__ = Mask  # Dynamo does not trace torch.ao; its sparsifiers still work with a Mask
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            torch.backends.mha.set_fastpath_enabled(False)
    if free_dense:
        _free_dense(model)
    take_dynamic(model)
    take_sparse(model)
    return model


def _free_dense(model: nn.Module) -> None:
    make_dense(model)
    make_plain_within(model, [(module, name) for module in model.modules() for name in masked_tensors(module)])
    uses = uses_of(model.modules())
    for layer in (m for m in model.modules() if type(m) in (nn.Linear, NonDynamicallyQuantizableLinear)):
        weight = layer._parameters.get("weight")
        if weight is not None and uses[id(weight)] == 1 and _is_pruned(weight):
            PackedLinear.of(layer)  # type: ignore[arg-type]


def _is_pruned(weight: torch.Tensor) -> bool:
    return weight.is_floating_point() and not weight.is_meta and count_nonzeros(weight) <= 0.9 * weight.numel()
