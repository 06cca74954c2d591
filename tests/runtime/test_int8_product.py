"""Products of int8 matrices by torch, on any CPU."""

import pytest
import torch

from gossamer.runtime import int8_product as module


@pytest.mark.parametrize("columns", [0, 1, 2, 1024, 1025, 3000])
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("bytedots", [True, False])
def test_sums_are_exact(columns: int, tokens: int, bytedots: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest values have the largest sums. A CPU without dot products of bytes multiplies floats."""
    if not bytedots:
        monkeypatch.setattr(module, "_has_byte_dots", lambda: False)
    x = torch.full((tokens, columns), -128, dtype=torch.int8)
    weight = torch.full((columns, 5), -128, dtype=torch.int8)
    weight[::3] = 127
    found = module.int8_product(x, weight)
    assert found.dtype is torch.int32
    assert torch.equal(found, (x.long() @ weight.long()).int())
