"""Long masks of positions and of documents: tables of what is seen are made for some queries at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.backend.graph import strips
from gossamer.sparsity.attention import mask as mask_module
from gossamer.sparsity.attention import tile_table as tile_tables
from gossamer.sparsity.attention.tile_table import TileTable, tile_table
from tests.backend.harness import assert_same, compile_and_run
from tests.backend.test_masked_attention import made, packed


def test_long_masks_are_made_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of positions, of documents in two batches, of blocks and of distances: tables and results are those of the whole mask."""
    blocks = made(10, 10) > 0

    def distances(i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i >= j, (i - j) * -0.1, -torch.inf)[None, None].expand(2, 3, -1, -1)

    functions: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
        lambda i, j: ((i - j).abs() <= 20) | (i < 1) | (j < 1),
        lambda i, j: torch.stack([i // 50, i // 70])[:, None] == torch.stack([j // 50, j // 70])[:, None, None],
        lambda i, j: blocks[i // 30, j // 30],
        distances,
    )
    for module in (strips, tile_tables, mask_module):
        monkeypatch.setattr(module, "LARGE", 1000)
    monkeypatch.setattr(tile_tables, "_STRIP", 64 * 300)
    q, k, v = (made(2, 3, 300, 16) for _ in range(3))
    for function in functions:

        def attention(q: Tensor, k: Tensor, v: Tensor, function: Callable[[Tensor, Tensor], Tensor] = function) -> Tensor:
            i = torch.arange(q.shape[2])
            return F.scaled_dot_product_attention(q, k, v, attn_mask=function(i[:, None], i))

        made_by: list[tile_tables.Strips | Tensor] = []

        def noted(mask: tile_tables.Strips | Tensor, turned: bool, lasts: bool, made_by: list[Any] = made_by) -> TileTable:
            made_by.append(mask)
            return tile_table(mask, turned, lasts)

        monkeypatch.setattr(mask_module, "tile_table", noted)
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        run = compile_and_run(attention, *tensors, regions=1, grad=True)
        expected = attention(*tensors)
        assert_same(run.output, expected)
        upstream = made(2, 3, 300, 16)
        for found, wanted in zip(*(torch.autograd.grad(x, tensors, upstream) for x in (run.output, expected)), strict=True):
            assert_same(found, wanted)
        places = torch.arange(300)
        whole = function(places[:, None], places)
        for mask in made_by:
            assert isinstance(mask, tile_tables.Strips)
            for turned in (False, True):
                tables = tile_table(mask, turned), tile_table(whole if whole.dim() == 4 else whole[None, None], turned)
                assert all(torch.equal(*parts) for parts in zip(*(table.tensors for table in tables), strict=True))


def test_long_masks_of_documents_are_made_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (strips, tile_tables, mask_module):
        monkeypatch.setattr(module, "LARGE", 1000)
    monkeypatch.setattr(tile_tables, "_STRIP", 64 * 300)
    seen = []
    of_strips = tile_tables._of_strips
    monkeypatch.setattr(tile_tables, "_of_strips", lambda *given: (seen.append(given), of_strips(*given))[1])
    tensors, document = [made(2, 2, 300, 16).requires_grad_() for _ in range(3)], (torch.arange(300) // 40).repeat(2, 1)
    run = compile_and_run(packed, *tensors, document, regions=2, grad=True)
    for each in (document, document.flip(1), document * 0):
        found, wanted = (function(*tensors, each) for function in (run.function, packed))
        assert_same(found, wanted)
        upstream = made(2, 2, 300, 16)
        for a, b in zip(*(torch.autograd.grad(x, tensors, upstream) for x in (found, wanted)), strict=True):
            assert_same(a, b)
    assert len(seen) >= 5  # three masks, and those whose gradients are ours the other way round
