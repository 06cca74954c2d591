"""Three and more products come in the order that costs least, if zeros of weights count."""

import pytest
import torch
from torch import Tensor

from tests.backend.test_low_rank import close, pruned, run


def test_three_products_come_in_the_cheaper_order() -> None:
    u, v, x = torch.randn(512, 8), torch.randn(8, 512), torch.randn(64, 512)
    y, decisions = run(lambda x: x @ (u @ v), x)
    assert [each.reason for each in decisions] == ["a product of 512x512 is not made: the products around it come first"]
    close(y, x @ (u @ v), 1e-4)


def test_an_order_that_is_cheap_already_stays() -> None:
    u, v, x = torch.randn(512, 8), torch.randn(8, 512), torch.randn(64, 512)
    y, decisions = run(lambda x: (x @ u) @ v, x)
    assert not [each for each in decisions if each.op == "product order"]
    close(y, (x @ u) @ v, 1e-4)


def test_a_product_with_its_own_transpose_stays() -> None:
    """The first product is a factor of the second one in any order, so that nothing is saved."""
    a, x = torch.randn(8, 512), torch.randn(64, 512)

    def gram(x: Tensor, a: Tensor) -> Tensor:
        h = x[:, :8] @ a
        return h @ h.t()

    y, decisions = run(lambda x: gram(x, a), x)
    assert not [each for each in decisions if each.op == "product order"]
    close(y, gram(x.double(), a.double()), 1e-4)


@pytest.mark.parametrize("density", [1.0, 0.02])
def test_zeros_count_in_the_order_of_products(density: float) -> None:
    """Densely, the product of the weights is worth making. That of two sparse ones has few zeros, so tokens meet both."""
    wide, narrow = pruned(2048, 512, density=density).weight, pruned(512, 2048, density=density).weight
    x = torch.randn(512, 512)
    y, decisions = run(lambda x: (x @ wide.t()) @ narrow.t(), x)
    assert [each.op for each in decisions if not each.sparse] == ["product order"] * (density == 1.0)
    assert sum(each.sparse for each in decisions) == 2 * (density < 1)
    close(y, (x @ wide.t()) @ narrow.t(), 1e-4)
