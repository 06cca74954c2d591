"""The objects of users: sparse tensors and their operations, and functions that prune models, train them sparse or prepare
them for torch.compile.
"""

from gossamer.runtime import torch_internals
from gossamer.runtime.modules.given_back import give_back
from gossamer.runtime.modules.packages import watch_packages
from gossamer.runtime.modules.when_loaded import when_loaded
from gossamer.sparsity import dealt
from gossamer.sparsity.edges import attention_derivatives
from gossamer.sparsity.operations import tall_product
from gossamer.sparsity.prepare import prepare
from gossamer.sparsity.pruning.mask import Mask
from gossamer.sparsity.tensor import (
    arithmetic,
    broadcasting,
    densify,
    joining,
    layouts,
    memory,
    pointwise,
    products,
    reductions,
    shapes,
    slices,
    softmax,
)
from gossamer.sparsity.tensor.counted_writes import count_for_arrays
from gossamer.sparsity.tensor.einsum import EinsumError, einsum
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor
from gossamer.sparsity.torch_functions import calling, numpy_functions, torch_refusals
from gossamer.sparsity.torch_functions.batch_norm import trace_any_number

operations = (
    arithmetic, attention_derivatives, broadcasting, calling, dealt, densify, joining, layouts, memory, numpy_functions,
    pointwise, products, reductions, shapes, slices, softmax, tall_product,
)  # fmt: skip
"""The import of these modules registers torch's functions for SparseTensors, and the derivatives of attention."""

count_for_arrays()
when_loaded("torch._inductor", lambda: watch_packages(torch_internals.ahead_of_time))
when_loaded("torch._dynamo", trace_any_number)
give_back()
of_elements = [
    each for each, ours in SparseTensor.functions.items() if ours.__module__ not in (memory.__name__, dealt.__name__)
]
torch_refusals.ask_about(of_elements)

__all__ = ["EinsumError", "Mask", "SparseTensor", "einsum", "operations", "prepare"]
