"""What training stored weights keeps in memory: bytes that are alive, packed copies included; nothing is timed."""

import copy
import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from gossamer import Format, SparseTensor
from gossamer.backend.graph.stored_matrix import StoredMatrix
from gossamer.dialects.packing import Padded
from gossamer.runtime.packing import Packed, pack
from tests.backend.harness import assert_same, compile_and_run, prune_

WIDTHS = (512, 512, 512, 512, 512)


def stored(density: float = 0.1, widths: tuple[int, ...] = WIDTHS) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for given, made in pairwise(widths):
        layers += [nn.Linear(given, made, bias=False), nn.ReLU()]
    return gossamer.store_sparse(prune_(nn.Sequential(*layers), density))  # type: ignore[type-var]


def alive() -> int:
    """The bytes of all memory that tensors use."""
    gc.collect()
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided and each.device.type == "cpu":
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def step_of(model: nn.Module, call: Callable[..., Tensor], tokens: int = 64) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(1)
    x, target = torch.randn(tokens, WIDTHS[0]), torch.randn(tokens, WIDTHS[-1])

    def step() -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(call(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def trained() -> nn.Module:
    """A model after some steps, as its compiled function, with its optimizer and gradients."""
    torch._dynamo.reset()
    model = stored()
    run = compile_and_run(model, torch.randn(64, WIDTHS[0]), grad=True, regions=11, dense="inductor", schedule="broadcast")
    model.step = step_of(model, run.function)
    for _ in range(6):
        model.step()
    return model


def test_weights_gradients_adam_and_packed_copies_take_little_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1.6 times the density times what dense weights, gradients and Adam take, at the peak within a step."""
    lent, filled = StoredMatrix.lent, list[int]()

    def seen(self: StoredMatrix, *given: Any) -> Packed:
        found = lent(self, *given)
        filled.append(found.values.nbytes)
        return found

    monkeypatch.setattr(StoredMatrix, "lent", seen)
    trained()  # what kernels work in is there, for whatever model
    before = alive()
    model = trained()
    kept = alive() - before - 2 * 64 * WIDTHS[0] * 4  # without the batch
    nonzeros = sum(p.values().numel() for p in model.parameters())
    share = (kept + max(filled)) / (16 * nonzeros)
    assert 1.25 < share <= 1.6, share


@pytest.mark.parametrize("verify", ["version", "full"])
def test_values_for_a_call_are_the_right_ones_whatever_comes_between_steps(verify: str) -> None:
    """Steps alone, steps that accumulate, calls that change nothing, and a structure that moves."""
    model = stored(widths=(512, 48, 512))
    exact = copy.deepcopy(model).double()
    run = compile_and_run(model, torch.randn(64, 512), grad=True, regions=5, dense="inductor", verify=verify)
    torch.manual_seed(1)
    for calls in (1, 1, 1, 1, 1, 2, 1, 3, 1, 1, 1, 1, 1, 1):
        x = torch.randn(64, 512)
        for _ in range(calls):
            assert_same(run.function(x).detach(), exact(x.double()).detach().float())
            for module, given in ((run.function, x), (exact, x.double())):
                module(given).square().sum().backward()
        for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            assert_same(mine.grad.values(), theirs.grad.values().float())
            with torch.no_grad():
                theirs.add_(theirs.grad, alpha=-1e-3)
                mine.values().copy_(theirs.values())
            mine.grad = theirs.grad = None
    torch._dynamo.reset()
    other = compile_and_run(
        model, x, grad=True, regions=5, dense="inductor", verify={"version": "full", "full": "version"}[verify]
    )
    assert_same(other.output.detach(), exact(x.double()).detach().float())


@pytest.mark.parametrize("reduction", [0, 1])
def test_stored_values_are_packed_without_the_matrix_as_with_it(reduction: int) -> None:
    """Sizes that are no multiple of a panel, rows and columns without an entry, one entry; no other formats."""
    torch.manual_seed(0)
    for rows, columns, width, density in ((37, 50, 16, 0.3), (300, 70, 64, 0.05), (40, 600, 8, 0.5), (5, 3, 16, 1.0)):
        dense = torch.randn(rows, columns) * (torch.rand(rows, columns) < density)
        dense[rows // 2, 1:], dense[1:, columns // 2], dense[0, 0] = 0, 0, torch.nan
        stored, packing = SparseTensor.from_dense(dense, Format.CSR.with_widths(32, 32)), Padded(reduction, width)
        found = StoredMatrix(stored.format, (rows, columns)).packed(packing, stored.components)
        assert found is not None
        for mine, expected in zip(found[0].components, pack(dense, packing).components, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)
    other = StoredMatrix(stored.format, (rows, columns))
    assert other.packed(Format.CSR, stored.components) is None
    columns_first = SparseTensor.from_dense(dense, Format.CSC)
    assert StoredMatrix(Format.CSC, (rows, columns)).packed(packing, columns_first.components) is None
