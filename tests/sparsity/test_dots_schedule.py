"""The schedule "dots": dense dot products at the entries of CSR (SDDMM), its groups, tails and parts."""

import pytest
import torch

from gossamer import Format
from gossamer.dialects.errors import CompileError
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.compiler.contract_ir import Operand, sample
from gossamer.sparsity.compiler.operands import Spec
from gossamer.sparsity.operations.calls import kernel_of
from gossamer.sparsity.operations.dense_results import sample_ir
from tests.sparsity.made import by_rows, matrix, team_of

S, X, Y = Operand("ij", Format.CSR.with_widths(32, 32)), Operand("ik"), Operand("jk")


@pytest.mark.parametrize(
    ("pattern", "factors", "dtype"),
    [
        (S, (X, Operand("kj")), torch.float32),
        (S, (Operand("i"), Operand("j")), torch.float32),
        (S, (X, Y), torch.int32),
        (Operand("ij", Format.COO), (X, Y), torch.float32),
    ],
)
def test_what_it_refuses_goes_to_the_reference(pattern: Operand, factors: tuple[Operand, ...], dtype: torch.dtype) -> None:
    with pytest.raises(CompileError, match="the dots schedule"):
        compile_region(sample(pattern, factors, dtype), schedule="dots")
    assert kernel_of(sample_ir, Spec((pattern, *factors), Operand("p")), dtype).schedule == "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduced", [1, 15, 16, 33, 128])
def test_it_computes_what_the_reference_does(dtype: torch.dtype, reduced: int) -> None:
    dense = matrix(60, 50)
    dense[7] = 1
    pattern, entries = by_rows(dense.to(dtype)), int((dense != 0).sum())
    x, y = (torch.arange(n * reduced).view(n, reduced).remainder(m).sub(3).to(dtype) for n, m in ((60, 7), (50, 5)))
    contract = sample(S, [X, Y], dtype)
    for threads in (1, 2, 7):
        results = torch.empty(2, entries, dtype=dtype)
        with team_of(threads):
            for schedule, out in zip(("dots", "reference"), results, strict=True):
                compile_region(contract, schedule=schedule)([pattern, x, y], out)
        assert torch.equal(*results)
        torch.testing.assert_close(results[0], (x.double() @ y.double().T)[dense != 0].to(dtype))


def test_factors_without_the_reduced_dimension_scale() -> None:
    dense = matrix(40, 40)
    x, y, scale = torch.rand(40, 21), torch.rand(40, 21), torch.rand(40)
    out = torch.empty(int((dense != 0).sum()))
    contract = sample(S, [X, Y, Operand("i")], torch.float32)
    compile_region(contract, schedule="dots")([by_rows(dense), x, y, scale], out)
    torch.testing.assert_close(out, (scale[:, None] * (x @ y.T))[dense != 0])


def test_what_lies_beyond_the_reduced_dimension_stays_there() -> None:
    dense = torch.ones(3, 3)
    x, y, scale = torch.rand(3, 5), torch.rand(3, 5), torch.tensor([torch.inf, torch.nan, 1.0])
    out = torch.empty(9)
    compile_region(sample(S, [X, Y, Operand("i")], torch.float32), schedule="dots")([by_rows(dense), x, y, scale], out)
    torch.testing.assert_close(out.view(3, 3), scale[:, None] * (x @ y.T), equal_nan=True)
