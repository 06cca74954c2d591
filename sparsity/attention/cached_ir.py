"""Contract IR of attention of a few queries over a cache: `kernel.attend_cached` and `kernel.attend_appended`."""

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
    """What a kernel is made for: heads of `size` elements of a type, `queries` of them for each, and `group` of them share the
    keys and values of one; the steps of the score, and the type of a mask."""

    size: int
    group: int
    queries: int
    dtype: torch.dtype
    score: tuple[Step, ...]
    mask: torch.dtype | None


def contract_of(heads: Heads, appends: bool) -> str:
    """(q, k, v, mask if there is one, sizes...) → out, or
    (q, k, v, new_k, new_v, mask if there is one, sizes...) → (out, all_k, all_v) where it `appends`
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
