"""Masks and soft caps of attention in chains."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.backend.chains.dense_chain import attend
from gossamer.backend.run.compiled_region import CompiledRegion
from tests.backend.harness import assert_same, compile_and_run
from tests.backend.test_chains import HEADS, Attention, D, PostNorm, model


@pytest.mark.parametrize("shape", [(3, 1, 1, 20), (1, 1, 20, 20), (3, 1, 20, 20), (20, 20)])
def test_masks_are_added_to_the_scores(shape: tuple[int, ...]) -> None:
    module, x = model(PostNorm()), torch.randn(3, 20, D)
    mask = torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, float("-inf"))
    mask[..., 0] = 0
    mask[..., -1, :] = torch.finfo(mask.dtype).min  # a query all of whose keys are hidden like that sees the mean
    run = compile_and_run(module, x, mask)
    assert {d.reason for d in run.regions} == {"in a chain of 6"}
    assert_same(run.output, module(x, mask))


def seen_by_queries(padding: Tensor, causal: bool = False) -> Tensor:
    """As transformers writes masks: what a function of positions says, and what padding does."""
    positions = torch.arange(padding.shape[1])
    queries, keys = positions[None, None, :, None], positions[None, None, None, :]
    seen = torch.ones((), dtype=torch.bool) & (keys <= queries if causal else queries >= 0)
    return (seen & padding[:, None, None, :]).expand(padding.shape[0], -1, len(positions), len(positions))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_that_hides_padding_is_computed_once_and_as_a_row(
    causal: bool, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = nn.ModuleList([model(PostNorm()), model(PostNorm())])

    def function(x: Tensor, padding: Tensor) -> Tensor:
        seen = seen_by_queries(padding, causal)
        for layer in layers:
            x = layer(x, seen)
        return x

    given = list[list[Tensor]]()
    call = CompiledRegion.__call__
    monkeypatch.setattr(CompiledRegion, "__call__", lambda chain, tensors: given.append(tensors) or call(chain, tensors))
    padding = torch.arange(20) < torch.tensor([20, 11, 5])[:, None]
    run = compile_and_run(function, torch.randn(3, 20, D), padding, dynamic=dynamic, regions=12)
    assert {d.reason for d in run.regions} == {"in a chain of 12"}
    for sizes in ([20, 11, 5], [9, 20, 1], [14, 14]) if dynamic else ([20, 11, 5], [9, 20, 1]):
        x, padding = torch.randn(len(sizes), max(sizes), D), torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
        with torch.no_grad():
            assert_same(run.function(x, padding), function(x, padding))
        rows = len(sizes) * (max(sizes) if causal else 1)
        assert [m.shape for m in given[-1] if m.dim() == 2 and m.shape[1] == max(sizes)] == [(rows, max(sizes))]


class Capped(Attention):
    """Written out, its scores bounded before the mask is added, as Gemma 2 has it."""

    def forward(self, x: Tensor, sees: Tensor | None = None) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, HEADS, D // HEADS).transpose(1, 2) for p in self.project)
        scores = torch.tanh(q @ k.mT * (D // HEADS) ** -0.5 / 2) * 2
        if sees is not None:
            scores = scores + torch.where(sees, torch.zeros((), dtype=x.dtype), torch.finfo(x.dtype).min)
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, s, D))


CAUSAL = torch.ones(1, 1, 70, 70, dtype=torch.bool).tril()
PADDED = torch.arange(70) < torch.tensor([70, 40, 7])[:, None, None, None]


@pytest.mark.parametrize("sees", [None, CAUSAL, PADDED], ids=["all", "causal", "padded"])
def test_soft_caps_are_part_of_a_chain(sees: Tensor | None) -> None:
    module, x = model(Capped()), torch.randn(3, 70, D)
    run = compile_and_run(module, x, sees, regions=4)
    assert {d.reason for d in run.regions} == {"in a chain of 4"}
    expected = module.double()(x.double(), sees).float()
    assert_same(run.output, expected)
    module.float()
    with torch.no_grad():
        module.out.weight.normal_(std=0.3)  # too dense for its kernel
    assert_same(run.function(x, sees), module(x, sees))


def test_one_mask_for_all_sequences_where_the_batch_is_left_to_the_view() -> None:
    class Inferred(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            b, s, _ = x.shape
            q, k, v = (p(x).view(-1, s, HEADS, D // HEADS).transpose(1, 2) for p in self.project)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.out(y.transpose(1, 2).reshape(b, s, D))

    module, x = model(Inferred()), torch.randn(3, 20, D)
    for shape in ((1, 1, 1, 20), (1, 1, 20, 20)):
        mask = torch.randn(shape)
        run = compile_and_run(module, x, mask)
        assert {d.reason for d in run.regions} == {"in a chain of 4"}
        assert_same(run.output, module(x, mask))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_where_torch_has_it(bad: float) -> None:
    layer = model(PostNorm())

    def function(x: Tensor, padding: Tensor) -> Tensor:
        return layer(x, seen_by_queries(padding))

    padding = torch.arange(37) < torch.tensor([37, 20])[:, None]
    run = compile_and_run(function, torch.randn(2, 37, D), padding, regions=6)
    for at in (0, 19, 36):  # seen by all, the last that the second sequence sees, hidden from that
        x = torch.randn(2, 37, D)
        x[1, at, 3] = bad
        with torch.no_grad():
            found, expected = run.function(x, padding), function(x, padding)
        assert torch.equal(found.isnan(), expected.isnan())
        assert_same(found.nan_to_num(), expected.nan_to_num())


def test_soft_caps_in_plain_torch_hide_no_nan() -> None:
    q, k, v = torch.randn(3, 5, 8)
    q[2, 0] = torch.nan
    how = {"heads": 1, "kv_heads": 1, "head_size": 8, "offsets": (0, 0, 0), "scale": 0.5, "cap": 2.0}
    mask = torch.zeros(1, 1, 5, 5)
    mask[..., 1, :] = -torch.inf  # sees no key
    y = attend(5, q, k, v, mask, **how, causal=False, key_mask=False)
    assert y[2].isnan().all() and (y[1] == 0).all() and y[3:].isfinite().all()
