"""The schedule "tall": a tall dense matrix times a narrow one, its tiles and tails, on any team."""

import pytest
import torch

from gossamer.dialects.errors import CompileError
from gossamer.sparsity.compiler import contract_ir
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.operations.tall_product import tall_kernel
from tests.sparsity.made import team_of

product = torch.ops.gossamer.tall_product.default

SIZES = [(1, 1, 1), (7, 3, 5), (5, 0, 4), (0, 3, 4), (6, 9, 16), (13, 5, 33), (200, 65, 80), (1000, 40, 130)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_products(dtype: torch.dtype, threads: int) -> None:
    with team_of(threads):
        for m, k, n in SIZES:
            x, w = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
            torch.testing.assert_close(product(x, w), (x.double() @ w.double()).to(dtype))


def test_nothing_beside_the_result_is_written() -> None:
    kernel = tall_kernel(torch.float32)
    for m, k, n in SIZES[4:]:
        around = torch.full((m + 2, n), torch.nan)
        x, w = torch.randn(m, k), torch.randn(k, n)
        kernel([x, w], around[1:-1])
        assert around[[0, -1]].isnan().all() and not around[1:-1].isnan().any()


def test_it_computes_what_the_reference_does() -> None:
    contract = contract_ir.einsum((Operand("ik"), Operand("kj")), Operand("ij"), torch.float32)
    x, w = (torch.arange(n * m).view(n, m).remainder(7).float() for n, m in ((50, 20), (20, 37)))
    results = [torch.empty(50, 37), torch.empty(50, 37)]
    for schedule, out in zip(("tall", "reference"), results, strict=True):
        compile_region(contract, schedule=schedule)([x, w], out)
    assert torch.equal(*results)


def test_operands_need_not_be_contiguous() -> None:
    x, w = torch.randn(9, 40).t(), torch.randn(6, 9).t()
    torch.testing.assert_close(product(x, w), x @ w)


def test_other_types_are_refused() -> None:
    with pytest.raises(CompileError, match="dense x dense in f32 or f64"):
        tall_kernel(torch.bfloat16)
