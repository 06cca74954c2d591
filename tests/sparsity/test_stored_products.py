"""Products of sorted rows with the stored weights of experts, against a loop over dense ones in torch."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gossamer import SparseTensor
from gossamer.dialects.errors import ArgumentError
from gossamer.sparsity.experts.stored_products import LINES
from gossamer.sparsity.pruning.grouped_products import grouped_product

ENDS = [[1, 2, 3, 7], [0, 0, 7, 7], [2, 2, 2, 4], [0, 0, 0, 0], [7, 7, 7, 7]]


def pruned(dtype: torch.dtype = torch.float64) -> Tensor:
    """[experts, 5, 9]; the third expert has no nonzeros."""
    torch.manual_seed(0)
    weight = torch.randn(4, 5, 9, dtype=dtype) * (torch.rand(4, 5, 9) < 0.3)
    weight[2] = 0
    return weight


def stored(weight: Tensor) -> SparseTensor:
    return SparseTensor.from_dense(weight, LINES.with_widths(32, 32))


def by_experts(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    parts = [x[begin:end] @ weight[e] for e, (begin, end) in enumerate(pairwise([0, *ends.tolist()]))]
    return torch.cat([*parts, x.new_zeros(len(x) - int(ends[-1]), weight.shape[2])])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("ends", ENDS)
def test_rows_are_multiplied_by_the_matrix_of_their_expert(ends: list[int], turned: bool) -> None:
    given = torch.tensor(ends, dtype=torch.int32)
    dense = pruned().requires_grad_()
    sparse = stored(pruned()).requires_grad_()
    x = torch.randn(7, 9 if turned else 5, dtype=torch.float64, requires_grad=True)
    own = x.detach().clone().requires_grad_()
    found = grouped_product(own, sparse.mT if turned else sparse, given)
    wanted = by_experts(x, dense.mT if turned else dense, given)
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn_like(wanted)
    found.backward(gradient)
    wanted.backward(gradient)
    assert dense.grad is not None and isinstance(sparse.grad, SparseTensor)
    torch.testing.assert_close(own.grad, x.grad)
    torch.testing.assert_close(sparse.grad.to_dense(), dense.grad * (dense != 0))


@pytest.mark.parametrize("turned", [False, True])
def test_gradients_have_gradients_and_tangents(turned: bool) -> None:
    sparse, ends = stored(pruned()), torch.tensor([1, 3, 4, 6])
    x = torch.randn(7, 9 if turned else 5, dtype=torch.float64, requires_grad=True)
    values = sparse.values().clone().requires_grad_()

    def product(x: Tensor, values: Tensor) -> Tensor:
        weight = sparse.with_values(values)
        return grouped_product(x, weight.mT if turned else weight, ends)

    assert torch.autograd.gradcheck(product, (x, values), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(product, (x, values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types(dtype: torch.dtype) -> None:
    ends, weight, x = torch.tensor([1, 3, 4, 7]), pruned(dtype), torch.randn(7, 5).to(dtype)
    found = grouped_product(x, stored(weight), ends)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), by_experts(x.double(), weight.double(), ends), rtol=2e-2, atol=2e-2)


def test_no_rows_at_all() -> None:
    found = grouped_product(torch.empty(0, 5, dtype=torch.float64), stored(pruned()), torch.zeros(4, dtype=torch.int32))
    assert found.shape == (0, 9)


@pytest.mark.parametrize("ends", [[1, 0, 3, 4], [1, 2, 3, 8], [-1, 2, 3, 4]])
def test_ends_that_do_not_ascend_within_the_rows_are_refused(ends: list[int]) -> None:
    x = torch.randn(7, 5, dtype=torch.float64)
    with pytest.raises(ArgumentError, match=r"experts: the rows of expert \d end at"):
        grouped_product(x, stored(pruned()), torch.tensor(ends))


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"tokens have 6 elements, must have 5 for weights \[5, 9\]"):
        grouped_product(torch.randn(7, 6, dtype=torch.float64), stored(pruned()), torch.tensor([1, 2, 3, 4]))


def test_changed_values_count() -> None:
    sparse, ends, x = stored(pruned()), torch.tensor([2, 4, 5, 7]), torch.randn(7, 5, dtype=torch.float64)
    for _ in range(5):
        torch.testing.assert_close(grouped_product(x, sparse, ends), by_experts(x, sparse.to_dense(), ends))
        with torch.no_grad():
            sparse.mul_(2)
