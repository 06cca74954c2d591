"""Products share out their groups of rows evenly among threads, whatever the height of a group.

The code that shares them out runs on any processor, so the tests need none that can multiply bf16.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch_mlir import ir
from torch_mlir.dialects import arith, func, memref

from gossamer.passes.codegen.emit_entry import ENTRY
from gossamer.passes.framework.context import context
from gossamer.passes.framework.translate import translate_to_llvm_ir
from gossamer.passes.loops.product import Product, products
from gossamer.passes.loops.vectors import index, loop
from gossamer.passes.registry import run_pipeline
from gossamer.passes.weights_bf16.lower_amxcolumns import PanelProduct
from gossamer.passes.weights_bf16.strips import Strips
from gossamer.runtime import jit
from gossamer.runtime.target import host

REGION = """
func.func @region(%x: tensor<?x64xbf16>, %w: tensor<{rows}x64xbf16, "{stored}">) -> tensor<?x{rows}xbf16> {{
  %y = "kernel.spmm"(%x, %w) ({{
  ^bb0(%sum: f32):
    %1 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }}) {{lanes = 16 : i64, reduction = 1 : i64, schedule = "any", tile = {tile}}}
    : (tensor<?x64xbf16>, tensor<{rows}x64xbf16, "{stored}">) -> tensor<?x{rows}xbf16>
  return %y : tensor<?x{rows}xbf16>
}}"""


def parts(make: Callable[[Any], Product], rows: int, stored: str, tile: list[int], threads: int) -> list[tuple[int, int]]:
    """The groups of rows [low, high) that each of some threads computes."""
    with context(), ir.Location.unknown():
        module = ir.Module.parse(REGION.format(rows=rows, stored=stored, tile=tile))
        run_pipeline(module, "expose-storage")
        (op,) = products(module, "any")
        product = make(op)
        only = ir.Module.create()
        ranges = ir.MemRefType.get([threads, 2], ir.IntegerType.get_signless(64))
        with ir.InsertionPoint(only.body):
            function = func.FuncOp("f", ([ranges], []))
        with ir.InsertionPoint(function.add_entry_block()):
            with loop(index(0), index(threads), index(1)) as chunks:
                chunk = chunks.induction_variable
                for end, row in enumerate(product.row_range(chunk, index(threads))):
                    word = arith.index_cast(ranges.element_type, row)
                    memref.store(word, function.entry_block.arguments[0], [chunk, index(end)])
            func.ReturnOp([])
        run_pipeline(only, "emit-entry,lower-to-llvm{bits=256}")
        llvm_ir = translate_to_llvm_ir(only.operation)
    code = jit.load(jit.object_code(jit.optimize(llvm_ir, host()), host()), ENTRY)
    found = np.zeros((threads, 2), np.int64)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)(ctypes.addressof(ctypes.c_int64(found.ctypes.data)))
    return [(low, high) for low, high in found.tolist()]


@pytest.mark.parametrize("height", [16, 32])
@pytest.mark.parametrize(
    ("make", "stored", "tile"),
    [
        (Strips, "vnni(reduction=1, rows={}, columns=4)", [96, 96]),
        (PanelProduct, "panels(reduction=1, rows={}, width=32)", [32]),
    ],
    ids=["strips", "panels"],
)
def test_threads_compute_equally_many_strips(make: Callable[[Any], Product], stored: str, tile: list[int], height: int) -> None:
    given = stored.format(height)
    assert parts(make, 8 * height, given, tile, 2) == [(0, 4), (4, 8)]
    assert parts(make, 6 * height, given, tile, 3) == [(0, 2), (2, 4), (4, 6)]
    # The last strip has a row less.
    assert parts(make, 2 * height - 1, given, tile, 2) == [(0, 1), (1, 2)]
