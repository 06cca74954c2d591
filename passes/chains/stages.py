"""Emits the bodies of a chain's stages: functions on the tile's memory, for a fixed number of vectors of tokens.

    pack     buffer[n][t] = matrix[first + t, n], transposed in squares of one vector
    round    rounds a buffer to bf16
    product  sums[m][t] = epilogue(sum_k w[m, k] x[k][t]), a few rows at a time
    rows     sums, maxima and maps: see rows_stage.py
    unpack   matrix[first + t, n] = buffer[n][t]

Tokens past the last one of a tile repeat it, and are not stored. The rows of tokens may have a stride (`step`) in the matrix.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.passes.chains.frame import Frame
from gossamer.passes.chains.inner_products import emit_inner, features_at_once
from gossamer.passes.chains.plan_chain import Place, Rounded, Tiled, columns
from gossamer.passes.framework.chain_product import ChainProduct, Expansion, Layout, Orders, Stores
from gossamer.passes.loops.epilogue import Epilogue
from gossamer.passes.loops.vectors import (
    index,
    loop,
    mask_of,
    narrowed,
    transpose,
    vector_of,
    widened,
    zeros,
)
from gossamer.passes.weights_bf16.bf16_columns import LINE, round_columns, store_column, transpose_columns
from gossamer.passes.weights_bf16.bf16_pairs import pack_lines, round_lines, round_rows, store_line

Unpack = Callable[[ir.Value, ir.Value], None]
"""Stores the features [low, high) of a product."""

_EPILOGUES = 8  # number of vectors that go through an epilogue at once


def emit_pack(value: ir.Value, frame: Frame, first: ir.Value, valid: ir.Value, step: ir.Value | None) -> None:
    """Packs the tile's tokens of a matrix from outside, feature-major."""
    (source,) = frame.outside[value]
    emit_transposed(source, frame.buffers[value], index(columns(value)), frame, first, valid, step)


def emit_transposed(
    source: ir.Value,
    buffer: ir.Value,
    width: ir.Value,
    frame: Frame,
    first: ir.Value,
    valid: ir.Value,
    step: ir.Value | None = None,
) -> None:
    """Copies source[first + t * step, n] to buffer[n, t] for n < width."""
    lanes, narrow = frame.lanes, vector_of(frame.lanes, ir.MemRefType(source.type).element_type)
    with loop(index(0), width, index(lanes)) as ns, loop(index(0), frame.at(frame.vectors), index(lanes)) as ts:
        n, t = ns.induction_variable, ts.induction_variable
        mask = mask_of(lanes, arith.subi(width, n))
        rows = []
        for r in range(lanes):
            token = _token(arith.addi(t, index(r)), first, valid, step)
            rows.append(widened(vector.maskedload(narrow, source, [token, n], mask, zeros(narrow)), frame.vec))
        for r, column in enumerate(transpose(rows)):
            vector.store(column, buffer, [arith.addi(n, index(r)), t])


def _token(t: ir.Value, first: ir.Value, valid: ir.Value, step: ir.Value | None) -> ir.Value:
    """Returns the row of token t of a tile; past the end, that of the last token."""
    t = arith.minui(t, arith.subi(valid, index(1)))
    return arith.addi(first, t if step is None else arith.muli(t, step))


def emit_unpack(
    value: ir.Value,
    frame: Frame,
    out: ir.Value,
    first: ir.Value,
    valid: ir.Value,
    step: ir.Value | None,
    low: ir.Value,
    high: ir.Value,
) -> None:
    """Stores the features [low, high) of the tile's part of a result, token-major."""
    lanes, width = frame.lanes, index(columns(value))
    stored = vector_of(lanes, ir.MemRefType(out.type).element_type)
    none = arith.constant(
        vector_of(lanes, ir.IntegerType.get_signless(1)),
        ir.DenseElementsAttr.get_splat(vector_of(lanes, ir.IntegerType.get_signless(1)), ir.BoolAttr.get(False)),
    )
    with loop(low, high, index(lanes)) as ns, loop(index(0), frame.at(frame.vectors), index(lanes)) as ts:
        n, start = ns.induction_variable, ts.induction_variable
        mask = mask_of(lanes, arith.subi(width, n))
        rows = [vector.load(frame.vec, frame.buffers[value], [arith.addi(n, index(r)), start]) for r in range(lanes)]
        for r, row in enumerate(transpose(rows)):
            t = arith.addi(start, index(r))
            exists = arith.cmpi(arith.CmpIPredicate.ult, t, valid)
            token = _token(t, first, valid, step)
            vector.maskedstore(out, [token, n], arith.select(exists, mask, none), narrowed(row, stored))


def emit_pack_rounded(target: Rounded, frame: Frame, first: ir.Value, valid: ir.Value) -> None:
    """Packs the tile's tokens of a matrix from outside, in bf16."""
    (source,), rounded = frame.outside[target.value], frame.buffers[target]
    size, last = columns(target), arith.subi(arith.addi(first, valid), index(1))
    pack = {"columns": transpose_columns, "lines": pack_lines}[target.layout]
    pack(source, rounded, index(size), first, last, -(-size // LINE) * LINE, frame.vectors, frame.lanes)


def emit_round(target: Rounded, frame: Frame) -> None:
    """Rounds a value of the tile to bf16."""
    round_ = {"columns": round_columns, "lines": round_lines, "rows": round_rows}[target.layout]
    round_(frame.buffers[target.value], frame.buffers[target], columns(target), frame.vectors, frame.lanes)


def emit_product(
    op: Any, product: ChainProduct, packed: ir.Value, gives: Layout | None, frame: Frame, unpack: Unpack | None = None
) -> None:
    """Emits the shares [low, high) of the rows of a product with `packed`, some rows at a time, panel by panel of columns.

    The result goes to its buffer or, if the stage `gives` bf16, to the buffer for that. With `unpack`, whole vectors of rows
    are also stored into the region's result at once.
    """
    result, epilogue = op.operation.results[0], Epilogue(op.epilogue.blocks[0])
    target = result if gives is None else Rounded(result, gives)
    sums_of = vector_of(frame.lanes, epilogue.sum.type)  # integers for a quantized product
    assert not isinstance(product.inner, Expansion)
    inner = product.inner(frame.outside[op.w], packed, sums_of, frame.vectors)
    if isinstance(inner, Stores):
        _emit_stored(inner, sums_of, epilogue, product, target, columns(result), frame)
        return
    height, size, vectors = product.rows(frame.vectors), columns(result), frame.vectors
    whole = unpack is not None or bool(epilogue.inner)
    cuts = product.share(frame.lanes, whole) * product.height // height
    types, places = [sums_of] * height * vectors, [divmod(i, vectors) for i in range(height * vectors)]
    low, high = (arith.muli(bound, index(cuts)) if cuts > 1 else bound for bound in (frame.low, frame.high))
    high = arith.minui(high, index(product.groups * product.height // height)) if cuts > 1 or whole else high
    step = index(max(product.step * product.height // height // cuts, 1) * cuts)
    with loop(low, high, step) as chunks:
        start = chunks.induction_variable
        end = arith.minui(arith.addi(start, step), high)
        with loop(index(0), index(product.panels), index(1)) as panels:
            panel = panels.induction_variable
            is_last = arith.cmpi(arith.CmpIPredicate.eq, panel, index(product.panels - 1))

            def multiply(low: ir.Value, high: ir.Value) -> None:
                with loop(low, high, index(1)) as groups:
                    group = groups.induction_variable
                    first = arith.muli(group, index(height)) if height > 1 else group
                    rows = [arith.addi(first, index(r)) if r else first for r in range(height)]
                    rows = inner.members(panel, group) if isinstance(inner, Orders) else rows
                    sums = [zeros(sums_of)] * len(types)
                    if product.panels > 1:
                        old = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, panel, index(0)), types, has_else=True)
                        with ir.InsertionPoint(old.then_block):
                            scf.YieldOp(sums)
                        with ir.InsertionPoint(old.else_block):
                            scf.YieldOp([vector.bitcast(sums_of, frame.load(result, rows[r], v)) for r, v in places])
                        sums = list(old.results)
                    totals = inner.add(panel, group, sums)
                    if epilogue.inner:
                        store_rows([vector.bitcast(frame.vec, total) for total in totals], rows, result, frame)
                    elif product.panels > 1:
                        last = scf.IfOp(is_last, has_else=True)
                        with ir.InsertionPoint(last.else_block):
                            store_rows([vector.bitcast(frame.vec, total) for total in totals], rows, result, frame)
                            scf.YieldOp([])
                        with ir.InsertionPoint(last.then_block):
                            store_rows(finished(epilogue, frame, product, size, rows, totals), rows, target, frame)
                            scf.YieldOp([])
                    else:
                        store_rows(finished(epilogue, frame, product, size, rows, totals), rows, target, frame)

            if not whole:
                multiply(start, end)
            else:
                with loop(start, end, index(cuts)) as shares:
                    share = shares.induction_variable
                    share_end = arith.minui(arith.addi(share, index(cuts)), end)
                    multiply(share, share_end)
                    done = scf.IfOp(is_last)
                    with ir.InsertionPoint(done.then_block):
                        bounds = [arith.minui(arith.muli(bound, index(height)), index(size)) for bound in (share, share_end)]
                        if epilogue.inner:
                            _finish(epilogue, frame, product, result, target, sums_of, *bounds)
                        if unpack is not None:
                            unpack(*bounds)
                        scf.YieldOp([])


def _finish(
    epilogue: Epilogue, frame: Frame, product: ChainProduct, result: ir.Value, target: Tiled, sums_of: ir.VectorType,
    low: ir.Value, high: ir.Value,
) -> None:  # fmt: skip
    """Puts sums of rows [low, high) through an epilogue with dense products. Several rows at once share loads of tokens."""
    together = features_at_once(frame)
    with loop(low, high, index(together)) as several:
        rows = [arith.addi(several.induction_variable, index(r)) for r in range(together)]
        sums = [vector.bitcast(sums_of, frame.load(result, row, v)) for row in rows for v in range(frame.vectors)]
        store_rows(finished(epilogue, frame, product, columns(result), rows, sums), rows, target, frame)


def _emit_stored(
    inner: Stores, sums_of: ir.VectorType, epilogue: Epilogue, product: ChainProduct, target: Tiled, size: int, frame: Frame
) -> None:
    """Emits a product whose inner loops store the sums of a group. A few vectors at a time go through the epilogue."""
    width = frame.vectors if isinstance(target, Rounded) else min(inner.at_once, frame.vectors)  # a line has two vectors
    sums = memref.alloca(ir.MemRefType.get([product.height, width * frame.lanes], sums_of.element_type), [], [], alignment=64)
    together = max(1, _EPILOGUES // width)
    with (
        loop(index(0), frame.at(frame.vectors), index(width * frame.lanes)) as starts,
        loop(frame.low, frame.high, index(1)) as groups,
    ):
        token, group = starts.induction_variable, groups.induction_variable
        part = replace(frame, vectors=width, start=token)
        inner.store(group, sums, token)
        with loop(index(0), index(product.height), index(together)) as several:
            slots = [arith.addi(several.induction_variable, index(i)) for i in range(together)]
            totals = [vector.load(sums_of, sums, [slot, frame.at(v)]) for slot in slots for v in range(width)]
            rows = [inner.row(group, slot) for slot in slots]
            store_rows(finished(epilogue, part, product, size, rows, totals), rows, target, part)


def store_rows(totals: list[ir.Value], rows: list[ir.Value], target: Tiled, frame: Frame) -> None:
    by_row = [totals[r * frame.vectors : (r + 1) * frame.vectors] for r in range(len(rows))]
    buffer = frame.buffers[target]
    if not isinstance(target, Rounded):
        for row, mine in zip(rows, by_row, strict=True):
            for v, total in enumerate(mine):
                frame.store(total, target, row, v)
    elif target.layout == "columns":
        for row, mine in zip(rows, by_row, strict=True):
            store_column(mine, buffer, row)
    else:
        for row, even, odd in zip(rows[::2], by_row[::2], by_row[1::2], strict=True):
            store_line(even, odd, buffer, arith.divui(row, index(2)), frame.start)


def finished(
    epilogue: Epilogue, frame: Frame, product: ChainProduct, size: int, rows: list[ir.Value], totals: list[ir.Value]
) -> list[ir.Value]:
    """Puts the sums of a group through the epilogue. Rows past the last of `size` read the operands of the last row."""
    whole = product.groups * product.height == size and not epilogue.inner
    safe = rows if whole else [arith.minui(row, index(size - 1)) for row in rows]
    inner = {op.results[0]: emit_inner(op.opview, safe, frame) for op in epilogue.inner}
    found = []
    for i, total in enumerate(totals):
        row, v = divmod(i, frame.vectors)
        read = frame.reader(safe[row], v, {result: values[i] for result, values in inner.items()})
        found.append(widened(epilogue.whole(total, read), frame.vec))
    return found


def view(workspace: ir.Value, place: Place, width: int, offset: ir.Value) -> ir.Value:
    """Returns a tile's part of a tensor, `width` tokens of it, from byte `offset` of the workspace on."""
    return memref.view(ir.MemRefType.get(place.shape(width), place.element), workspace, offset, [])
