"""Contract IR of attention under a table of tiles: `kernel.attend_blocks` and its gradients, for any sizes and strides."""

from collections.abc import Sequence

from torch_mlir import ir
from torch_mlir.dialects import func

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

_OPS = {
    "forward": (AttendBlocksOp, (), ("out", "statistics")),
    "queries": (AttendBlocksOfQueriesOp, ("gradient", "statistics", "delta"), ("of_q",)),
    "keys": (AttendBlocksOfKeysOp, ("gradient", "statistics", "delta"), ("of_k", "of_v")),
    "scores": (AttendBlocksOfScoresOp, ("gradient", "statistics", "delta"), ("of_k", "of_v", "of_scores")),
}
"""By what they are called here: the op, what gradients need besides, and what it gives."""


def attend_blocks(
    what: str, head_size: int, scale: float, score: Sequence[Step] = (), dropout: float = 0.0, dots: bool = False
) -> str:
    """forward                (q, k, v, positions, tiles, words, floats, seed if there is dropout, pairs, sizes...) → (out,
                           statistics)
    queries, keys, scores  (gradient, statistics, delta, and all of these) → the gradients

    `pairs` are there if products are `dots`: q and k in bf16 or, for gradients, q, k, v and the gradient.
    """
    op, more, results = _OPS[what]
    with building():
        module = ir.Module.create()
        floats, narrow, wide = (_memory(kind) for kind in ("f32", "i16", "i32"))
        count = len(SIZES) + 3 * len(STRIDED[f"kernel.{op.OPERATION_NAME.removeprefix('kernel.')}"])
        seed = [wide] if dropout else []
        pairs = [_memory("bf16")] * ((4 if more else 2) if dots else 0)
        types = [*[floats] * (len(more) + 3), wide, wide, narrow, floats, *seed, *pairs, *[ir.IndexType.get()] * count]
        steps = [ir.StringAttr.get(s) if isinstance(s, str) else ir.FloatAttr.get(ir.F64Type.get(), s) for s in (scale, *score)]
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("region", (types, [floats] * len(results)))
        with ir.InsertionPoint(function.add_entry_block()):
            arguments = list(function.entry_block.arguments)
            made = op(
                *arguments[len(more) : len(more) + 7],
                sizes=arguments[-count:],
                head_size=ir.IntegerAttr.get(ir.IntegerType.get_signless(64), head_size),
                score=ir.ArrayAttr.get(steps),
                seed=arguments[len(more) + 7] if dropout else None,
                pairs=arguments[-count - len(pairs) : -count],
                dropout=ir.FloatAttr.get(ir.F64Type.get(), dropout),
                **dict(zip(more, arguments, strict=False)),
                **dict.fromkeys(results, floats),
            )
            func.ReturnOp([getattr(made, name) for name in results])
        module.operation.verify()
        return str(module)


def _memory(element: str) -> ir.RankedTensorType:
    return ir.RankedTensorType.get([ir.ShapedType.get_dynamic_size()], ir.Type.parse(element))
