"""Contract IR of attention under a table of tiles: `kernel.attend_blocks` and its gradients, for any sizes and strides."""

from torch_mlir import ir
from torch_mlir.dialects import func

from gossamer.dialects.attention import (
    SIZES,
    STRIDED,
    AttendBlocksOfKeysOp,
    AttendBlocksOfQueriesOp,
    AttendBlocksOp,
)
from gossamer.passes.framework.context import context

_OPS = {
    "forward": (AttendBlocksOp, 3, ("out", "statistics")),
    "queries": (AttendBlocksOfQueriesOp, 6, ("of_q",)),
    "keys": (AttendBlocksOfKeysOp, 6, ("of_k", "of_v")),
}
"""By what they are called here: the op, how many arrays of floats it reads, and what it gives."""


def attend_blocks(what: str, head_size: int, scale: float) -> str:
    """forward        (q, k, v, positions, tiles, words, sizes...) → (out, statistics)
    queries, keys  (q, k, v, gradient, statistics, delta, positions, tiles, words, sizes...) → the gradients
    """
    op, reads, results = _OPS[what]
    with context(), ir.Location.unknown():
        module = ir.Module.create()
        floats, narrow, wide = (_memory(kind) for kind in ("f32", "i16", "i32"))
        count = len(SIZES) + 3 * len(STRIDED[f"kernel.{op.OPERATION_NAME.removeprefix('kernel.')}"])
        types = [*[floats] * reads, wide, wide, narrow, *[ir.IndexType.get()] * count]
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("region", (types, [floats] * len(results)))
        with ir.InsertionPoint(function.add_entry_block()):
            arguments = list(function.entry_block.arguments)
            made = op(
                *arguments[:-count],
                arguments[-count:],
                ir.IntegerAttr.get(ir.IntegerType.get_signless(64), head_size),
                ir.FloatAttr.get(ir.F64Type.get(), scale),
                **dict.fromkeys(results, floats),
            )
            func.ReturnOp([getattr(made, name) for name in results])
        module.operation.verify()
        return str(module)


def _memory(element: str) -> ir.RankedTensorType:
    return ir.RankedTensorType.get([ir.ShapedType.get_dynamic_size()], ir.Type.parse(element))
