"""Gradients of convolutions' weights, summed where a mask keeps them."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gossamer.backend.run.masked_filters import masked_filter_gradient
from gossamer.sparsity.prepare import Mask
from tests.backend.harness import compile_and_run
from tests.sparsity.made import team_of


@dataclass
class _Case:
    g: Tensor
    x: Tensor
    mask: Tensor
    how: tuple[Sequence[int], Sequence[int], Sequence[int], int]

    @classmethod
    def random(cls, seed: int, dtype: torch.dtype) -> "_Case":
        torch.manual_seed(seed)
        take = Random(seed)
        dims, groups = take.choice([1, 2, 2, 3]), take.choice([1, 1, 2, 3])
        kernel, stride, padding, dilation = (
            [take.randint(low, high) for _ in range(dims)] for low, high in ((1, 4), (1, 3), (0, 4), (1, 3))
        )
        if seed % 4 == 0:  # lines as they are
            kernel, stride, padding = [1] * dims, [1] * dims, [0] * dims
        least = [max(1, d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation, strict=True)]
        x = torch.randn(take.randint(1, 3), groups * take.randint(1, 5), *(n + take.randint(0, 9) for n in least), dtype=dtype)
        mask = (torch.rand(groups * take.randint(1, 5), x.shape[1] // groups, *kernel) < 0.4).to(dtype)
        y = torch.ops.aten.convolution(x, mask, None, stride, padding, dilation, False, [0] * dims, groups)
        return cls(torch.randn_like(y), x, mask * take.choice([1, 2]), (stride, padding, dilation, groups))

    def expected(self) -> Tensor:
        """By torch, in float64; 0 where the mask is 0."""
        stride, padding, dilation, groups = self.how
        g, x, mask = (each.double() for each in (self.g, self.x, self.mask))
        none, wanted = [0] * len(stride), [False, True, False]
        dense = torch.ops.aten.convolution_backward(g, x, mask, None, stride, padding, dilation, False, none, groups, wanted)[1]
        return torch.where(mask != 0, dense * mask, 0.0).to(self.x.dtype)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_gives_the_gradient_of_random_convolutions(dtype: torch.dtype) -> None:
    for seed in range(60):
        case = _Case.random(seed, dtype)
        with team_of(1 + seed % 3):
            found = masked_filter_gradient(case.g, case.x, case.mask, *case.how)
        tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {}
        torch.testing.assert_close(found, case.expected(), **tolerance)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_reaches_what_torch_says(value: float) -> None:
    for seed in range(30):
        case = _Case.random(seed, torch.float64)
        for given in (case.x, case.g):
            given.view(-1)[seed % given.numel()] = value
            found = masked_filter_gradient(case.g, case.x, case.mask, *case.how)
            torch.testing.assert_close(found, case.expected(), equal_nan=True)


def test_channels_last_and_masks_that_change_and_empty_batches() -> None:
    x, g = torch.randn(3, 6, 9, 17).double(), torch.randn(3, 8, 9, 17).double()
    case = _Case(
        g, x.contiguous(memory_format=torch.channels_last), torch.zeros(8, 6, 3, 3).double(), ([1, 1], [1, 1], [1, 1], 1)
    )
    for share in (0.0, 0.3, 1.0):
        case.mask.copy_(torch.rand_like(case.mask) < share)
        torch.testing.assert_close(masked_filter_gradient(case.g, case.x, case.mask, *case.how), case.expected())
    empty = masked_filter_gradient(g[:0], x[:0], case.mask, *case.how)
    assert torch.equal(empty, torch.zeros_like(case.mask))


@pytest.mark.parametrize(("sparsity", "regions"), [(0.99, 3), (0.02, 0)])
def test_what_would_not_gain_stays_dense_and_says_why(sparsity: float, regions: int) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=False)
    parametrize.register_parametrization(layer, "weight", Mask((torch.rand_like(layer.weight) > sparsity).float()))
    x = torch.randn(2, 64, 32, 32, requires_grad=True)
    run = compile_and_run(layer, x, grad=True, min_gain=1.1, regions=regions)
    (found,) = [d for d in run.decisions if d.op == "gradient"]
    assert found.gain is not None and found.sparse == (found.gain >= 1.1) == (regions > 0)
    dense = "no convolution is sparse here, and dense ones have channels innermost"
    assert found.reason == ("where the mask keeps it" if regions else dense)
