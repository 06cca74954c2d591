"""Empty rows and columns of weights with blocks or n:m: what is left out keeps the pattern, where its kernel is worth more."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from gossamer.backend.graph.zero_pattern import Pattern
from gossamer.backend.smaller.analysis import Product
from tests.backend.harness import assert_same
from tests.backend.smaller import Pair, run, small_layers_pay, smaller

__all__ = ["small_layers_pay"]


@pytest.fixture(autouse=True)
def patterns_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions of a machine on which kernels for blocks or n:m take a tenth of the dense time for as many nonzeros, and
    other zeros gain nothing."""

    def sparse_us(_: Product, weight: Tensor, pattern: Pattern) -> float:
        nonzeros = pattern.density * weight.numel()
        has_kernel = pattern.rows.nm is not None or (pattern.block is not None and max(pattern.block) >= 16)
        return 0.1 * nonzeros + 0.05 * weight.numel() if has_kernel else float("inf")

    monkeypatch.setattr("gossamer.backend.smaller.worth._sparse_us", sparse_us)
    monkeypatch.setattr("gossamer.backend.smaller.worth._dense_us", lambda _, weight: float(weight.numel()))


def blocks(rows: int, columns: int, size: tuple[int, int], density: float = 0.2) -> Tensor:
    """A weight whose nonzeros fill such blocks."""
    m, k = rows // size[0], columns // size[1]
    there = torch.rand(m, k) < density
    there[torch.arange(max(m, k)) % m, torch.arange(max(m, k)) % k] = True  # no row or column of blocks is empty
    return torch.randn(rows, columns) * there.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)


def two_of_four(rows: int, columns: int) -> Tensor:
    scores = torch.rand(rows, columns // 4, 4)
    kept = torch.zeros_like(scores).scatter(2, scores.topk(2, -1).indices, 1.0)
    return torch.randn(rows, columns) * kept.flatten(1)


def layer_of(weight: Tensor, dim: int, empty: Sequence[int]) -> nn.Linear:
    """A layer with a weight some of whose rows (0) or columns (1) are empty."""
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data = weight.index_fill(dim, torch.tensor(empty), 0)
    return layer


class Beside(nn.Module):
    """A layer beside one that becomes smaller, so that there is something to report."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.other = layer, layer_of(torch.randn(16, 8), 0, range(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.other(x[:, :8])


def run_beside(layer: nn.Module, x: Tensor) -> tuple[str, str]:
    """The size of the layer's weight, smaller or whole, and all reasons. Its result is that of the layer."""
    made = run(Beside(layer), x)
    assert_same(made.output[0], layer(x).detach())
    sizes = smaller(made)
    assert sizes.pop("other.weight") == "8x8"
    shape = [each.shape for each in made.decisions if each.name == "layer.weight"][-1]
    return sizes.get("layer.weight", "x".join(map(str, shape))), " ".join(each.reason for each in made.decisions)


SCATTERED = range(3, 256, 13)  # 20 of 256, in every block of 16

KEPT = {
    "rows in blocks of 16x1": (lambda: blocks(256, 64, (16, 1)), 0, "blocks of 16x1"),
    "columns in blocks of 1x16": (lambda: blocks(64, 256, (1, 16)), 1, "blocks of 1x16"),
    "rows in blocks of 32x32": (lambda: blocks(256, 256, (32, 32)), 0, ""),
    "columns in 2:4": (lambda: two_of_four(64, 256), 1, "2:4"),
}


@pytest.mark.parametrize("name", KEPT)
def test_empty_lines_stay_where_a_pattern_would_be_lost(name: str) -> None:
    make, dim, label = KEPT[name]
    weight = make()
    layer = layer_of(weight, dim, [*SCATTERED])
    size, reasons = run_beside(layer, torch.randn(9, weight.shape[1]))
    assert size == "x".join(map(str, weight.shape))
    # What a sparse kernel takes has that as its reason.
    assert (
        not label
        or f"20 of 256 {'columns' if dim else 'rows'} are zeros, but without them the weight would lose its {label}" in reasons
    )


MULTIPLES = {  # the weight, and the empty lines: those of whole blocks or groups, and others
    "rows in blocks of 16x1": (lambda: blocks(256, 64, (16, 1), 0.5), 0, 16, "160x64"),
    "columns in blocks of 1x16": (lambda: blocks(64, 256, (1, 16), 0.5), 1, 16, "64x160"),
    "columns in 2:4": (lambda: two_of_four(64, 256), 1, 4, "64x160"),
}


@pytest.mark.parametrize("name", MULTIPLES)
def test_whole_blocks_and_groups_are_left_out(name: str) -> None:
    make, dim, size, format = MULTIPLES[name]
    weight = make()
    whole = [line for start in range(0, 96 // size) for line in range(2 * start * size, (2 * start + 1) * size)]
    layer = layer_of(weight, dim, [*whole, *range(17, 256, 9)])
    assert run_beside(layer, torch.randn(9, weight.shape[1]))[0] == format


@pytest.mark.parametrize(("name", "dim"), [("1x16", 0), ("16x1", 1), ("2:4", 0)])
def test_lines_that_are_no_part_of_the_pattern_are_left_out(name: str, dim: int) -> None:
    weight = two_of_four(256, 256) if name == "2:4" else blocks(256, 256, (1, 16) if name == "1x16" else (16, 1))
    layer = layer_of(weight, dim, range(0, 256, 2))
    assert run_beside(layer, torch.randn(9, 256))[0] == ("256x128" if dim else "128x256")


def test_a_pattern_is_given_up_where_that_is_faster() -> None:
    """Of 256 rows four stay: dense, they take less time than the whole weight in blocks."""
    weight = blocks(256, 64, (16, 1), 1.0)
    layer = layer_of(weight, 0, range(4, 256))
    assert run_beside(layer, torch.randn(9, 64))[0] == "4x64"


def test_the_layer_before_keeps_what_the_blocks_of_the_next_need() -> None:
    """Rows of the first layer are columns of the second, whose blocks of 1x16 have some of them together."""
    pair, x = Pair(), torch.randn(9, 16)
    pair.first, pair.second = nn.Linear(16, 128), nn.Linear(128, 512)
    pair.second.weight.data = blocks(512, 128, (1, 16))
    pair.second.weight.data[:, 32:64] = 0
    with torch.no_grad():
        pair.first.weight[[3, 20, 70, 90, 99, 110, 121, 127]] = 0
        pair.first.bias[[3, 20, 70, 90, 99, 110, 121, 127]] = 0
    made = run(pair, x)
    assert smaller(made)["first.weight"] == "96x16"
    assert_same(made.output, pair(x).detach())


def test_a_pattern_that_a_changed_weight_has_lost_is_no_longer_kept() -> None:
    weight = blocks(256, 64, (16, 1))
    layer = layer_of(weight, 0, [*SCATTERED])
    x = torch.randn(9, 64)
    made = run(layer, x, regions=0)
    for empty in ([], range(0, 256, 2)):
        with torch.no_grad():
            layer.weight.copy_(torch.randn(256, 64))
            layer.weight[[*empty]] = 0
            assert_same(made.function(x), layer(x).detach())
