"""Products sampled at the entries of a CSR matrix (SDDMM), run in the emulator and assembled by NVIDIA's assembler."""

import re

import pytest
import torch
from torch import Tensor

from tests.contracts import TYPES, assert_near
from tests.gpu.assembler import assembled
from tests.gpu.emulator import Fault
from tests.gpu.kernels import no_generic_access, planted
from tests.gpu.open_products import compiled, emulate


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


def eighths(*size: int) -> Tensor:
    return (torch.randn(size) * 8).round() / 8


def sampled(
    pattern: Tensor, x: Tensor, y: Tensor, element: str = "f32", seed: int | None = None, ptx: str | None = None
) -> Tensor:
    factors = [t.to(TYPES[element]) for t in (x, y)]
    count = int(pattern.count_nonzero())
    return emulate(compiled("dots", element), "e256", pattern.to(TYPES[element]), factors, (count,), seed=seed, ptx=ptx)


def expected(pattern: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (x.double() @ y.double().t())[pattern.bool()]


@pytest.mark.parametrize("k", [1, 3, 32, 34, 72])
def test_any_length_of_the_sums(k: int) -> None:
    pattern, x, y = (torch.rand(13, 40) < 0.7).float(), eighths(13, k), eighths(40, k)
    pattern[3], pattern[12] = 0, 0
    assert_near(sampled(pattern, x, y), expected(pattern, x, y))


@pytest.mark.parametrize("element", ["f64", "bf16", "f16"])
def test_every_type_gives_the_products_at_the_entries(element: str) -> None:
    for k in (3, 40):
        pattern, x, y = (torch.rand(5, 20) < 0.5).float(), eighths(5, k), eighths(20, k)
        assert_near(sampled(pattern, x, y, element), expected(pattern, x, y))


def test_rows_without_entries_at_both_ends() -> None:
    pattern, x, y = torch.zeros(9, 3), eighths(9, 5), eighths(3, 5)
    pattern[4, 1] = 1
    assert_near(sampled(pattern, x, y), expected(pattern, x, y))


def test_infinity_and_nan_reach_the_entries_that_depend_on_them_only() -> None:
    pattern, x, y = torch.ones(3, 4), eighths(3, 9), eighths(4, 9)
    pattern[0, 2], x[1, 8], y[:, 8], y[3, 8] = 0, torch.inf, 1, torch.nan
    result = torch.zeros(3, 4)
    result[pattern.bool()] = sampled(pattern, x, y)
    assert torch.isinf(result).nonzero().tolist() == [[1, 0], [1, 1], [1, 2]]
    assert torch.isnan(result).nonzero().tolist() == [[0, 3], [1, 3], [2, 3]]


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_warps(seed: int) -> None:
    pattern, x, y = (torch.rand(5, 30) < 0.5).float(), eighths(5, 8), eighths(30, 8)
    assert_near(sampled(pattern, x, y, seed=seed), expected(pattern, x, y))


FAULTS = {
    "no barrier": (r"bar\.warp\.sync\s+-1;", "", 0),
    "no neighbours": (r"shfl\.sync\.bfly\.b32 (\s*%r\d+)[^,]*, (%r\d+), 1, [^;]*;", r"mov.b32 \1, \2;", 4),
    "shifted": (r"(ld\.global\.nc\.v4\.b32[^\[]*\[%rd\d+)\]", r"\1+16]", 0),
    "another entry": (r"(ld\.shared\.v2\.b64[^\[]*\[%rd\d+)\]", r"\1+16]", 1),
    "unclamped": (r"min\.u64 (\s*%rd\d+), (%rd\d+), [^;]*;", r"mov.b64 \1, \2;", 0),
}


@pytest.mark.parametrize(("pattern", "replacement", "number"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_caught(pattern: str, replacement: str, number: int) -> None:
    entries, x, y = (torch.rand(5, 30) < 0.5).float(), eighths(5, 8), eighths(30, 8)
    broken = planted(compiled("dots", "f32").ptx, pattern, replacement, number)
    with pytest.raises((Fault, AssertionError)):
        assert_near(sampled(entries, x, y, seed=0, ptx=broken), expected(entries, x, y))


@pytest.mark.parametrize(("element", "capability"), [("f32", 80), ("f32", 90), ("f32", 100), ("f64", 90), ("bf16", 80)])
def test_the_assembler_takes_the_kernel(element: str, capability: int) -> None:
    made = compiled("dots", element, capability)
    usage = assembled(made.ptx, capability)
    assert set(usage) == set(made.kernels.launches) == {"region_e256"}
    assert all(kernel.registers <= 128 and kernel.spilled == 0 for kernel in usage.values())
    assert no_generic_access(made.ptx)


@pytest.mark.parametrize("element", ["f32", "bf16"])
def test_entries_are_read_ahead_and_products_fused_with_sums(element: str) -> None:
    ptx = compiled("dots", element).ptx
    assert len(re.findall(r"ld\.global\.nc\.v4\.b32", ptx)) == 2 * 4, "both rows of four entries are on their way at once"
    assert "fma.rn.f32" in ptx and "mul.rn.f32" not in ptx.replace("mul.rn.f32x2", "")
