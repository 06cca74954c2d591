"""Attention over patterns whose entries fill tiles: the kernel of masks takes it, and gives what dense attention does."""

from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer
from gossamer.sparsity.edges import tiled_edges

TERMS = ("queries", "keys", "values")


def window(rows: int, columns: int, width: int = 40) -> Tensor:
    return (torch.arange(rows)[:, None] - torch.arange(columns)).abs() <= width


def terms(rows: int, columns: int, heads: int, size: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(rows + size)
    return {n: torch.randn(rows if n == "queries" else columns, heads, size).to(dtype).requires_grad_() for n in TERMS}


def dense(mask: Tensor, given: dict[str, Tensor], scale: float) -> Tensor:
    q, k, v = (given[name].double().transpose(0, 1) for name in TERMS)
    weights = (q @ k.mT * scale).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0)
    return (weights @ v).transpose(0, 1)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which calls the kernel of masks has taken."""
    found: list[str] = []
    for name in ("attend", "gradients"):
        run: Any = getattr(tiled_edges, name)

        def noted(*given: Any, name: str = name, run: Any = run) -> Any:
            found.append(name)
            return run(*given)

        monkeypatch.setattr(tiled_edges, name, noted)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(500, 500, 2, 16), (333, 470, 1, 20), (600, 501, 3, 64)])
def test_a_window_with_gradients_from_its_second_call_on(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, taken: list[str]
) -> None:
    rows, columns, *_ = sizes
    mask, given = window(rows, columns), terms(*sizes, dtype=dtype)
    mask[7] = False
    pattern = gossamer.SparseTensor.from_dense(mask.to(dtype))
    expected = dense(mask, given, 0.3)
    upstream = torch.randn(expected.shape).to(dtype)
    grads = torch.autograd.grad(expected, list(given.values()), upstream.double())
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for call in range(3):
        found = gossamer.graph_attention(pattern, given["values"], queries=given["queries"], keys=given["keys"], scale=0.3)
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
        for one, other in zip(torch.autograd.grad(found, list(given.values()), upstream), grads, strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=10 * tolerance, atol=10 * tolerance)
        assert taken == ["attend", "gradients"] * call


def test_a_backward_whose_forward_gathered(taken: list[str]) -> None:
    """The first call gathers, a second one comes before its gradients: rows without entries among them."""
    mask, given = window(400, 400), terms(400, 400, 2, 32)
    mask[::50] = False
    pattern = gossamer.SparseTensor.from_dense(mask.float())

    def call() -> Tensor:
        return gossamer.graph_attention(pattern, given["values"], queries=given["queries"], keys=given["keys"])

    first = call()
    call()
    upstream = torch.randn(400, 2, 32)
    found = torch.autograd.grad(first, list(given.values()), upstream)
    expected = torch.autograd.grad(dense(mask, given, 1.0), list(given.values()), upstream.double())
    assert taken == ["attend", "gradients"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-3, atol=1e-3)


def test_results_have_the_same_strides_at_every_call(taken: list[str]) -> None:
    mask, given = window(400, 400), {n: x.detach().mT.contiguous().mT for n, x in terms(400, 400, 2, 16).items()}
    pattern, expected = gossamer.SparseTensor.from_dense(mask.float()), dense(mask, given, 1.0)
    for _ in range(3):
        found = gossamer.graph_attention(pattern, given["values"], queries=given["queries"], keys=given["keys"])
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
        assert found.is_contiguous()
    assert taken == ["attend"] * 2


def test_what_is_gathered(taken: list[str]) -> None:
    """Entries that leave tiles empty, occur twice, or have terms of their own; other types."""
    torch.manual_seed(0)
    given = terms(400, 400, 2, 16)
    far = gossamer.SparseTensor.from_dense((torch.rand(400, 400) < 0.2).float())
    near = gossamer.SparseTensor.from_dense(window(400, 400).float())

    def call(pattern: Any, **more: Any) -> Tensor:
        return gossamer.graph_attention(pattern, given["values"], queries=given["queries"], keys=given["keys"], **more)

    for _ in range(3):
        call(far)
        call(near, target=torch.randn(400, 2))
        call(near, slope=0.2)
        call(near, dropout=0.5)
    given = {name: term.double() for name, term in given.items()}
    for _ in range(3):
        call(gossamer.SparseTensor.from_dense(window(400, 400).double()))
    assert not taken


def test_in_a_graph_and_after_a_change(taken: list[str]) -> None:
    mask, given = window(400, 400), {name: term.detach() for name, term in terms(400, 400, 2, 16).items()}
    pattern = gossamer.SparseTensor.from_dense(mask.float())
    call = torch.compile(
        lambda pattern, q, k, v: gossamer.graph_attention(pattern, v, queries=q, keys=k) * 2, backend="sparse", fullgraph=True
    )
    for _ in range(3):
        found = call(pattern, *(given[name] for name in TERMS))
        torch.testing.assert_close(found.double(), 2 * dense(mask, given, 1.0), rtol=1e-4, atol=1e-4)
    assert taken == ["attend"] * 2
