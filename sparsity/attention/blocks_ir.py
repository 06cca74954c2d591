"""Builds contract IR of attention under a table of tiles: `kernel.attend_blocks` and its gradients, for any sizes."""

from collections.abc import Sequence
from typing import Any

from torch_mlir import ir

from gossamer.dialects.attention import (
    SIZES,
    STRIDED,
    AttendBlocksOfKeysOp,
    AttendBlocksOfQueriesOp,
    AttendBlocksOfScoresOp,
    AttendBlocksOp,
    Step,
)
from gossamer.passes.framework.context import building
from gossamer.sparsity.compiler.op_ir import region

_OPS = {
    "forward": (AttendBlocksOp, (), ("out", "statistics")),
    "queries": (AttendBlocksOfQueriesOp, ("gradient", "statistics", "delta"), ("of_q",)),
    "keys": (AttendBlocksOfKeysOp, ("gradient", "statistics", "delta"), ("of_k", "of_v")),
    "scores": (AttendBlocksOfScoresOp, ("gradient", "statistics", "delta"), ("of_k", "of_v", "of_scores")),
}
"""By name here: the op, the additional operands of gradients, and the results."""


def attend_blocks(
    what: str, head_size: int, scale: float, score: Sequence[Step] = (), dropout: float = 0.0, dots: bool = False
) -> str:
    """Returns the IR of a function of flat arrays and sizes. By `what` it has:

    forward                (q, k, v, positions, tiles, words, floats, seed if there is dropout, pairs, sizes...) → (out,
                           statistics)
    queries, keys, scores  (gradient, statistics, delta, and all of the above) → the gradients

    With `dots` there are `pairs`: q and k in bf16 or, for gradients, q, k, v and the gradient.
    """
    op, more, results = _OPS[what]
    with building():
        floats, narrow, wide = (_memory(kind) for kind in ("f32", "i16", "i32"))
        takes: dict[str, Any] = dict.fromkeys((*more, "q", "k", "v"), floats)
        takes |= {"positions": wide, "tiles": wide, "words": narrow, "floats": floats} | ({"seed": wide} if dropout else {})
        takes["pairs"] = [_memory("bf16")] * ((4 if more else 2) if dots else 0)
        takes["sizes"] = [ir.IndexType.get()] * (len(SIZES) + 3 * len(STRIDED[op.OPERATION_NAME]))
        numbers = {"head_size": head_size, "score": (scale, *score), "dropout": dropout}
        return region(op, takes, dict.fromkeys(results, floats), **numbers)


def _memory(element: str) -> ir.RankedTensorType:
    return ir.RankedTensorType.get([ir.ShapedType.get_dynamic_size()], ir.Type.parse(element))
