"""Products with sums of several sparse terms and low ranks are computed in parts, to the numbers of float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.backend.test_low_rank import beside, close, pruned, run


@pytest.mark.parametrize(
    "total",
    [
        lambda s, t, a, b: s - 0.5 * a,
        lambda s, t, a, b: a * 2 - s,
        lambda s, t, a, b: torch.sub(s, a, alpha=3) + t,
        lambda s, t, a, b: (s + 0.1 * a) * 2 + b - t,
    ],
    ids=["difference", "other way round", "two sparse terms", "two low ranks"],
)
@pytest.mark.parametrize("turned", [False, True])
def test_sums_of_several_terms_with_signs_and_factors(total: Callable[..., Tensor], turned: bool) -> None:
    s, t = (pruned(512, 384).weight.detach() for _ in range(2))
    t = t * (s != 0)
    (u, v), (p, q) = ((torch.randn(512, rank), torch.randn(rank, 384)) for rank in (4, 7))
    x = torch.randn(64, 512 if turned else 384)

    def product(x: Tensor, s: Tensor, t: Tensor, u: Tensor, v: Tensor, p: Tensor, q: Tensor) -> Tensor:
        weight = total(s, t, u @ v, p @ q)
        return x @ weight if turned else F.linear(x, weight)

    y, decisions = run(lambda x: product(x, s, t, u, v, p, q), x)
    assert beside(decisions) == 1 and any("as x S + (x U) V, rank" in each.reason for each in decisions)
    close(y, product(*(each.double() for each in (x, s, t, u, v, p, q))))


def test_the_parts_of_a_sum_may_overflow_float16_so_it_stays_one() -> None:
    """x V overflows although x V U does not."""
    s, u, v = pruned(512, 384).weight, torch.randn(512, 8) * 1e-3, torch.rand(8, 384) * 1000 + 500
    s, u, v, x = (each.half() for each in (s, u, v, torch.rand(64, 384) + 0.5))
    y, decisions = run(lambda x: F.linear(x, s + u @ v), x)
    assert y.isfinite().all() and not any(each.op == "low rank" for each in decisions)
    close(y, F.linear(x.float(), s.float() + u.float() @ v.float()), 1e-2)
