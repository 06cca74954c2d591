"""The functions that the lowerings for experts call, by the number of slots (expert_product.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import func

from gossamer.passes.experts import few_slots, few_turned, many_slots, some_slots, tile_rows, tile_slots


@dataclass(frozen=True)
class Functions:
    """The functions of a product.

    few   add the products of few slots, by the number of slots, the most first
    some  add the products of some more slots, by their number at once, the most first; empty if panels serve them
    pack  packs a panel
    many  add the products of many slots with a panel, by the number of slots, the most first
    turn  transposes x for rows that are not packed
    rows  add the products of rows that are not packed, by the number of rows, then by that of slots
    """

    few: dict[int, func.FuncOp]
    some: dict[int, func.FuncOp]
    pack: func.FuncOp
    many: dict[int, func.FuncOp]
    turn: func.FuncOp | None
    rows: dict[int, dict[int, func.FuncOp]]


def functions_of(product: Any) -> Functions:
    """Makes the functions of a product, beside the function that has its op."""
    tile: Any = few_turned.FewTurned if product.turned else few_slots.FewSlots
    panel: Any = tile_slots.TileSlots if product.tiles else many_slots.ManySlots
    few = {n: _function(product, f"few{n}", 8, partial(tile, product, n)) for n in product.few}
    some = {n: _function(product, f"some{n}", 11, partial(some_slots.SomeSlots, product, n)) for n in product.some}
    pack = _function(product, "pack", 7, partial(many_slots.Pack, product))
    many = {n: _function(product, f"many{n}", 11, partial(panel, product, n)) for n in product.many}
    if not product.by_rows:
        return Functions(few, some, pack, many, None, {})
    turn = _function(product, "turn", 8, partial(tile_rows.TurnSlots, product))
    by_rows = {
        height: {
            width: _function(product, f"rows{height}x{width}", 12, partial(tile_rows.TileRows, product, height, width))
            for width in tile_rows.WIDTHS
        }
        for height in tile_rows.HEIGHTS
    }
    return Functions(few, some, pack, many, turn, by_rows)


def _function(product: Any, name: str, numbers: int, tile: Callable[..., Any]) -> func.FuncOp:
    parent = product.op.operation.parent.opview
    types = [*(each.type for each in product.memory()), *[ir.IndexType.get()] * numbers]
    with ir.InsertionPoint(parent):
        made = func.FuncOp(f"{parent.name.value}_{name}", (types, []), visibility="private")
    with ir.InsertionPoint(made.add_entry_block()):
        tile(*made.entry_block.arguments).emit()
        func.ReturnOp([])
    return made
