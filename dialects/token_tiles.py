"""The ops of the kernel dialect for sums over tokens: `kernel.pack_tokens` and `kernel.sample_tokens`; for blocks of bf16
`kernel.pack_token_pairs` and `kernel.sample_blocks`; `kernel.spread` and `kernel.collect` for the matrix of such entries.

Packed tokens lie in tiles, [tiles, features, width]: those of a tile side by side for each feature, zeros past the last one.
Packed pairs of tokens lie in panels of features, [panels, pairs, 2 width]: two tokens of each feature side by side.
"""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp, verified


def _packed_problem(type_: ir.RankedTensorType) -> str | None:
    if type_.rank != 3 or type_.is_dynamic_dim(2) or str(type_.element_type) not in ("f32", "f64"):
        return f"packs tokens as {type_}, must be [tiles, features, a fixed width] of f32 or f64"
    return None


def _pack_problem(op: Any) -> str | None:
    x, result = ir.RankedTensorType(op.x.type), ir.RankedTensorType(op.result.type)
    if x.rank != 2 or not isinstance(x.element_type, ir.FloatType):
        return f"packs {x}, must be [tokens, features] of floats"
    return _packed_problem(result)


def _holds_places(op: Any) -> bool:
    types = [ir.RankedTensorType(value.type) for value in (op.positions, op.coordinates)]
    return all(each.rank == 1 and isinstance(each.element_type, ir.IntegerType) for each in types)


def _sample_problem(op: Any) -> str | None:
    if not _holds_places(op):
        return "needs vectors of integers for the rows and columns of its entries"
    x, y, result = (ir.RankedTensorType(value.type) for value in (op.x, op.y, op.result))
    if result.rank != 1 or result.element_type != x.element_type or y.element_type != x.element_type:
        return f"takes tokens {x} and {y} to {result}, must be a value of their type for each entry"
    if y.rank == 2 and x.rank == 3 and x.is_dynamic_dim(2):
        return None if str(x.element_type) in ("f32", "f64") else f"sums {x.element_type}, must be f32 or f64"
    return _packed_problem(x) if x == y else f"takes tokens packed as {x} and as {y}, must be packed alike"


def _spread_problem(op: Any) -> str | None:
    if not _holds_places(op):
        return "needs vectors of integers for the rows and columns of its entries"
    values, dense, row = (ir.RankedTensorType(value.type) for value in (op.values, op.dense, op.row))
    if (
        values.rank != 1
        or dense.rank != 2
        or row.rank != 2
        or not values.element_type == dense.element_type == row.element_type
    ):
        return f"spreads {values} to {dense} by {row}, must be a vector, a matrix and rows of one type"
    return None


def _collect_problem(op: Any) -> str | None:
    if not _holds_places(op):
        return "needs vectors of integers for the rows and columns of its entries"
    dense, values = (ir.RankedTensorType(value.type) for value in (op.dense, op.values))
    if values.rank != 1 or dense.rank != 2 or values.element_type != dense.element_type:
        return f"collects {values} from {dense}, must be a vector and a matrix of one type"
    return None


def _pairs_problem(type_: ir.RankedTensorType) -> str | None:
    if type_.rank != 3 or str(type_.element_type) != "bf16" or type_.is_dynamic_dim(2) or type_.shape[2] not in (32, 64):
        return f"has pairs of tokens as {type_}, must be [panels, pairs, 32 or 64] of bf16"
    return None


def _pack_pairs_problem(op: Any) -> str | None:
    x, result = ir.RankedTensorType(op.x.type), ir.RankedTensorType(op.result.type)
    if x.rank != 2 or x.element_type != result.element_type:
        return f"packs {x} to {result}, must be [tokens, features] of their type"
    return _pairs_problem(result)


def _blocks_problem(op: Any) -> str | None:
    if not _holds_places(op):
        return "needs vectors of integers for the rows and columns of its blocks"
    x, y, result = (ir.RankedTensorType(value.type) for value in (op.x, op.y, op.result))
    if result.rank != 1 or result.element_type != x.element_type:
        return f"takes tokens {x} to {result}, must be a value of their type for each entry"
    return _pairs_problem(x) if x == y else f"takes tokens packed as {x} and as {y}, must be packed alike"


class PackTokensOp(KernelOp, name="pack_tokens", traits=[ext.Pure]):
    """packed[i, n, t] = x[i * width + t, n], 0 for tokens past the last one."""

    x: ext.Operand[Any]
    result: ext.Result[Any]

    verify_invariants = verified(_pack_problem)


class SampleTokensOp(KernelOp, name="sample_tokens", traits=[ext.Pure]):
    """values[p] = the sum over tiles i and tokens t of x[i, r, t] y[i, c, t], for the entries p = (r, c) of a matrix in CSR.

    positions [rows + 1], coordinates [entries], x [tiles, rows, width], y [tiles, columns, width]

    Where y is [tiles, elements], a coordinate is a place in it: values[p] = the sum of x[i, r, t] y[i, c + t], for any number
    of tokens t in a tile.
    """

    positions: ext.Operand[Any]
    coordinates: ext.Operand[Any]
    x: ext.Operand[Any]
    y: ext.Operand[Any]
    result: ext.Result[Any]

    verify_invariants = verified(_sample_problem)


class SpreadOp(KernelOp, name="spread", traits=[ext.Pure]):
    """dense[r, c] = values[p] for the entries p = (r, c) of a matrix in CSR, 0 elsewhere; `row` is a row to work in, a thread.

    positions [rows + 1], coordinates [entries], values [entries], dense [rows, columns], row [threads, columns]
    """

    positions: ext.Operand[Any]
    coordinates: ext.Operand[Any]
    values: ext.Operand[Any]
    dense: ext.Result[Any]
    row: ext.Result[Any]

    verify_invariants = verified(_spread_problem)


class CollectOp(KernelOp, name="collect", traits=[ext.Pure]):
    """values[p] = dense[r, c] for the entries p = (r, c) of a matrix in CSR.

    positions [rows + 1], coordinates [entries], dense [rows, columns]
    """

    positions: ext.Operand[Any]
    coordinates: ext.Operand[Any]
    dense: ext.Operand[Any]
    values: ext.Result[Any]

    verify_invariants = verified(_collect_problem)


class PackTokenPairsOp(KernelOp, name="pack_token_pairs", traits=[ext.Pure]):
    """packed[i, t, 2 n + h] = x[2 t + h, i * width + n], 0 for a token past the last one; features in whole panels."""

    x: ext.Operand[Any]
    result: ext.Result[Any]

    verify_invariants = verified(_pack_pairs_problem)


class SampleBlocksOp(KernelOp, name="sample_blocks", traits=[ext.Pure]):
    """values[p] = the sum over tokens of x[r] y[c], for the entries p = (r, c) of a matrix in CSR that is made of whole blocks.

    positions [block rows + 1], coordinates [blocks], x [block rows, pairs, 2 width], y [block columns, pairs, 2 width]

    The entries of a row of blocks are in the order of CSR: row by row, those of a row block by block.
    """

    positions: ext.Operand[Any]
    coordinates: ext.Operand[Any]
    x: ext.Operand[Any]
    y: ext.Operand[Any]
    result: ext.Result[Any]

    verify_invariants = verified(_blocks_problem)
