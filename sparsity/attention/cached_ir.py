"""Builds contract IR of attention of a few queries over a cache: `kernel.attend_cached` and `kernel.attend_appended`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch_mlir import ir

from gossamer.dialects.attention import Step
from gossamer.dialects.cached_attention import SIZES, STRIDED, AttendAppendedOp, AttendCachedOp
from gossamer.passes.framework.context import building
from gossamer.runtime.elements import FLOATS
from gossamer.sparsity.compiler.op_ir import region


@dataclass(frozen=True)
class Heads:
    """The properties for which a kernel is compiled.

    size     the elements of a head
    group    how many heads of queries share a head of keys and values
    queries  the number of queries in each head
    score    the steps of the score function
    mask     the dtype of the mask, None without a mask
    """

    size: int
    group: int
    queries: int
    dtype: torch.dtype
    score: tuple[Step, ...]
    mask: torch.dtype | None


def contract_of(heads: Heads, appends: bool) -> str:
    """Returns the IR of (q, k, v, mask if there is one, sizes...) → out.

    If it `appends`: (q, k, v, new_k, new_v, mask if there is one, sizes...) → (out, all_k, all_v).
    """
    op = AttendAppendedOp if appends else AttendCachedOp
    with building():
        memory = _memory(heads.dtype)
        takes: dict[str, Any] = dict.fromkeys(("q", "k", "v", *(["new_k", "new_v"] if appends else [])), memory)
        if heads.mask is not None:
            takes["mask"] = _memory(heads.mask)
        takes["sizes"] = [ir.IndexType.get()] * (len(SIZES) + 3 * len(STRIDED[op.OPERATION_NAME]))
        gives = dict.fromkeys(("out", *(["all_k", "all_v"] if appends else [])), memory)
        numbers = {"head_size": heads.size, "group": heads.group, "queries": heads.queries, "score": heads.score}
        return region(op, takes, gives, **numbers)


def _memory(dtype: torch.dtype) -> ir.RankedTensorType:
    return ir.RankedTensorType.get([ir.ShapedType.get_dynamic_size()], ir.Type.parse(FLOATS[dtype]))
