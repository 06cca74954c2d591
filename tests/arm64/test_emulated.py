"""Kernels for 64-bit ARM in an emulator, against f64: schedules, types, odd shapes, nothing at all, NaN."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gossamer.dialects.packing import Pairs, Quads
from gossamer.runtime import jit, region_kernel
from gossamer.runtime.packing import pack
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.runtime.target import Target
from gossamer.sparsity.compiler import compile_kernel
from tests.arm64 import emulator
from tests.backend.test_quantized import bytes_of, kernel_of
from tests.contracts import Region, assert_near

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))

ARM = replace(Target.named("neoverse-v1"), level=1)
SCHEDULES = {"broadcast": None, "rowpairs": None, "block": (4, 2), "blockvec": (4, 4)}
"""The schedules of floats that NEON has, and the blocks of their weights."""
TOKENS = {1: 0.5, 2: 0.1, 3: 1.0, 4: 0.3, 5: 0.3, 9: 0.2, 15: 0.0, 16: 0.3, 33: 0.1, 47: 0.5, 64: 0.3, 70: 0.3, 0: 0.3}
"""Numbers of tokens, and densities: no vector, one, several, and what is left over; weights of zeros."""


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without what is kept of kernels, and with the number of threads restored."""
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", "")
    monkeypatch.setattr(jit, "load", emulator.load)
    monkeypatch.setattr(compile_kernel, "_by_contract", {})
    monkeypatch.setattr(region_kernel, "_by_key", {})
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def run(kernel: RegionKernel, x: Tensor, w: Tensor, extras: list[Tensor], rows: int) -> Tensor:
    """What a kernel computes; what it does not write is NaN."""
    out = torch.full((x.shape[0], rows), torch.nan, dtype=x.dtype)
    assert kernel.formats[1] is not None
    kernel([x, pack(w, kernel.formats[1]), *extras], out)
    return out


@pytest.mark.parametrize("element", ["f32", "f64", "bf16", "f16"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_products_equal_those_in_f64(schedule: str, element: str) -> None:
    region = Region(70, 101, element, ("bias", "gelu"), block=SCHEDULES[schedule])
    kernel = compile_kernel.compile_region(region.text(), schedule=schedule, target=ARM)
    assert kernel.schedule == schedule
    for number, (tokens, density) in enumerate(TOKENS.items()):
        torch.set_num_threads(1 + number % 2)
        x, w, extras = region.operands(tokens, density)
        assert_near(run(kernel, x, w, extras, region.m), region.reference(x, w, extras))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shapes_may_be_as_odd_as_they_like(schedule: str) -> None:
    for m, k in ((1, 1), (17, 31), (1, 200), (199, 1)):
        region = Region(m, k, block=SCHEDULES[schedule])
        kernel = compile_kernel.compile_region(region.text(), schedule=schedule, target=ARM)
        for tokens in (1, 13, 64):
            x, w, extras = region.operands(tokens)
            assert_near(run(kernel, x, w, extras, m), region.reference(x, w, extras))


def test_dot_products_of_bf16_equal_products_in_f64() -> None:
    region = Region(70, 101, "bf16", ("bias", "gelu"))
    kernel = compile_kernel.compile_region(region.text(), schedule="pairs", target=ARM)
    assert isinstance(kernel.formats[1], Pairs)
    for tokens, density in TOKENS.items():
        x, w, extras = region.operands(tokens, density)
        assert_near(run(kernel, x, w, extras, region.m), region.reference(x, w, extras))


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("name", ["neoverse-n1", "neon"])
def test_sums_of_bytes_are_exact(name: str, block: int) -> None:
    """By dot products, and on processors that have none by products of words."""
    weight = bytes_of(33, 72, density=0.3, block=block)
    kernel, packed = kernel_of(weight, "quads", target=replace(Target.named(name), level=1))
    assert isinstance(packed.format, Quads)
    for tokens in TOKENS:
        x, y = bytes_of(tokens, 72), torch.full((tokens, 33), torch.nan)
        kernel([x, packed], y)
        assert torch.equal(y, (x.long() @ weight.long().t()).float())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nan_stays_in_its_token(schedule: str) -> None:
    region = Region(17, 31, block=SCHEDULES[schedule])
    kernel = compile_kernel.compile_region(region.text(), schedule=schedule, target=ARM)
    x, w, _ = region.operands(21)
    w[:, 5] = 1
    x[7, 5] = torch.nan
    found, others = run(kernel, x, w, [], region.m), torch.arange(21) != 7
    assert found[7].isnan().all()
    assert_near(found[others], region.reference(x, w, [])[others])
