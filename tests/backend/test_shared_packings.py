"""Graphs of several lengths share the packed copy of a weight."""

import gc

import torch
from torch import nn

from gossamer.runtime.packing import Packed
from tests.backend.harness import prune_


def copies(rows: int, columns: int) -> int:
    """Packed weights of this shape that live."""
    gc.collect()
    return sum(type(o) is Packed and tuple(o.shape) == (rows, columns) for o in gc.get_objects())


def test_a_static_and_an_open_length() -> None:
    layers = nn.Linear(320, 608), nn.GELU(), nn.Linear(608, 320), nn.LayerNorm(320), nn.Linear(320, 608)
    model = prune_(nn.Sequential(*layers), 0.1).eval()
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options={"dense": "eager", "min_gain": 0})
    with torch.no_grad():
        for tokens in (64, 100, 37, 130):
            x = torch.randn(tokens, 320)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
            assert copies(608, 320) == 2 and copies(320, 608) == 1, tokens
