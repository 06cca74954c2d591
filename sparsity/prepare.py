"""`gossamer.prepare`: a sparse model, rebuilt so that torch.compile sees its sparsity and nothing stands in the way.

    prune.l1_unstructured(layer, "weight", 0.9)        layer.weight = weight_orig * weight_mask, by a hook at every call
    model = gossamer.prepare(model)                →   layer.parametrizations.weight = [Mask(mask)], original = weight_orig

A hook writes the masked weight back into the module. A parametrization is read, never written, and its mask also reaches the
gradient.
"""

from collections import Counter
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gossamer.runtime.packers.nonzeros import count_nonzeros
from gossamer.sparsity.adjacency import take_sparse
from gossamer.sparsity.packed_linear import PackedLinear
from gossamer.sparsity.pruning.mask import Mask, is_masked, is_of_torch_ao, make_plain, parametrize_pruned
from gossamer.sparsity.pruning.stored_layers import make_dense
from gossamer.sparsity.quantization.dynamic_layers import take_dynamic

Model = TypeVar("Model", bound=nn.Module)


def prepare(model: Model, *, free_dense: bool = False) -> Model:
    """Make a sparse model ready for `torch.compile(model, backend="sparse")`; changes it in place and returns it.

    - Pruning by `torch.nn.utils.prune` becomes a mask parametrization. The parameters stay the same objects, so that an
      optimizer that holds them goes on; in the state dict `weight_orig` becomes `parametrizations.weight.original`, and
      `weight_mask` becomes `parametrizations.weight.0.mask`.
    - So does the mask of a sparsifier of torch.ao.pruning, before its `squash_mask`.
    - torch.sparse tensors of any layout become SparseTensors: parameters, buffers and attributes (in lists and dictionaries
      too), and arguments when the model is called, with fullgraph=True as well. The state dict keeps its names; checkpoints of
      the model as it was load. Layers of PyTorch Geometric take an adjacency (rows are targets) for an `edge_index`.
    - If the model has attention or transformer layers of torch.nn, their fused inference path, which makes nested tensors
      of padded batches, is turned off for the process (`torch.backends.mha.set_fastpath_enabled(False)`).
    - Linear layers of `torch.ao.quantization.quantize_dynamic` that have a tenth of zeros or more become layers of
      `gossamer.quantize`, with the same int8 weights and scales; inputs are then quantized token by token, which loses less.
      In the state dict `_packed_params` becomes `weight_int8`, `weight_scale` and `bias`; load checkpoints before. The other
      layers stay, and Dynamo breaks the graph at them.
    - The signature of `forward` stays, for who reads it (a Trainer of Hugging Face drops columns that are not in it).
      `torch.export` works. `finalize` turns all of this back, but for the zeros.
    - With `free_dense`, for inference: the weight of every linear layer that has a tenth of zeros or more is kept dense only
      until a compiled graph has packed it. Masks are multiplied in. Such a weight is no parameter any more and has no
      gradient; `layer.weight` and the state dict give dense copies under the usual names, checkpoints load as before, and
      what still needs it dense (a call without torch.compile, a layer that stays dense) rebuilds it. Weights that several
      modules share stay as they are.
    """
    parametrize_pruned(model)
    for module in model.modules():
        if is_of_torch_ao(module):
            module.__class__ = Mask  # Dynamo skips all of torch.ao; its sparsifiers go on with what they find
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            torch.backends.mha.set_fastpath_enabled(False)
    if free_dense:
        _free_dense(model)
    take_dynamic(model)
    take_sparse(model)
    return model


def _free_dense(model: nn.Module) -> None:
    make_dense(model)
    for module in list(model.modules()):
        if is_masked(module):
            make_plain(module)
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    for layer in (m for m in model.modules() if type(m) in (nn.Linear, NonDynamicallyQuantizableLinear)):
        weight = layer._parameters.get("weight")
        if weight is not None and uses[id(weight)] == 1 and _is_pruned(weight):
            PackedLinear.of(layer)  # type: ignore[arg-type]


def _is_pruned(weight: torch.Tensor) -> bool:
    return weight.is_floating_point() and not weight.is_meta and count_nonzeros(weight) <= 0.9 * weight.numel()
