"""Contract IR of attention under a table of tiles: `kernel.attend_blocks`, for any sizes and strides."""

from torch_mlir import ir
from torch_mlir.dialects import func

from gossamer.dialects.attention import SIZES, STRIDED, AttendBlocksOp
from gossamer.passes.framework.context import context


def attend_blocks(head_size: int, scale: float) -> str:
    """(q, k, v, positions, tiles, words, sizes...) → (out, statistics)"""
    with context(), ir.Location.unknown():
        module = ir.Module.create()
        floats, narrow, wide = (_memory(kind) for kind in ("f32", "i16", "i32"))
        count = len(SIZES) + 3 * len(STRIDED)
        types = [floats, floats, floats, wide, wide, narrow, *[ir.IndexType.get()] * count]
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("region", (types, [floats, floats]))
        with ir.InsertionPoint(function.add_entry_block()):
            *tensors, sizes = _split(list(function.entry_block.arguments), len(types) - count)
            op = AttendBlocksOp(
                *tensors,
                sizes,
                ir.IntegerAttr.get(ir.IntegerType.get_signless(64), head_size),
                ir.FloatAttr.get(ir.F64Type.get(), scale),
                out=floats,
                statistics=floats,
            )
            func.ReturnOp([op.out, op.statistics])
        module.operation.verify()
        return str(module)


def _memory(element: str) -> ir.RankedTensorType:
    return ir.RankedTensorType.get([ir.ShapedType.get_dynamic_size()], ir.Type.parse(element))


def _split(arguments: list[ir.Value], at: int) -> list[ir.Value | list[ir.Value]]:
    return [*arguments[:at], arguments[at:]]
