"""gossamer::tall_product(x, w) multiplies dense matrices, x [M, K] tall and w [K, N] narrow, by the schedule "tall".

It has no derivatives, because it is for compiled graphs, which already contain them.
"""

from functools import cache

import torch
from torch import Tensor

from gossamer.runtime.memory.warm_memory import empty
from gossamer.runtime.operations import Operation
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.compiler import contract_ir
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.compiler.contract_ir import Operand


@cache
def tall_kernel(dtype: torch.dtype) -> RegionKernel:
    """Returns the kernel for f32 or f64. CompileError for other types."""
    return compile_region(contract_ir.einsum((Operand("ik"), Operand("kj")), Operand("ij"), dtype), schedule="tall")


def tall_product(x: Tensor, w: Tensor) -> Tensor:
    """Computes the operation without the dispatcher."""
    out = empty((x.shape[0], w.shape[1]), x.dtype)
    tall_kernel(x.dtype)((x.contiguous(), w.contiguous()), out)
    return out


Operation(
    "tall_product(Tensor x: T[rows reduced], Tensor w: T[reduced columns]) -> Tensor: T[rows columns]",
    tall_product,
    torch.mm,
).register()
