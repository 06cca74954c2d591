"""The product for a few tokens, run in the emulator and assembled by NVIDIA's assembler."""

import pytest
import torch

from gossamer.dialects.errors import CompileError
from gossamer.passes import gpu_pipelines, pipelines
from tests.contracts import Region, assert_near
from tests.gpu.assembler import assembled
from tests.gpu.emulator import Fault
from tests.gpu.int8_region import Int8Region
from tests.gpu.kernels import compiled, emulate, no_generic_access, planted

SCHEDULE = "gpu-gather"


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("variant", ["t4", "t1"])
@pytest.mark.parametrize("element", ["f32", "bf16", "f16"])
def test_a_layer_with_an_epilogue(element: str, variant: str) -> None:
    region = Region(40, 700, element, ("bias", "gelu"))
    x, w, extras = region.operands(3)
    assert_near(emulate(compiled(region, SCHEDULE), variant, x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize(
    ("region", "tokens"),
    [
        (Int8Region(40, 700), 3),
        (Int8Region(33, 129, "bf16"), 9),
        (Int8Region(3, 33, bare=True), 2),
        (Int8Region(9, 300, "f16", transposed=True), 1),
    ],
)
def test_integers_are_summed_exactly(region: Int8Region, tokens: int) -> None:
    kernels, (x, w, extras) = compiled(region, SCHEDULE), region.operands(tokens)
    for variant in kernels.launches:
        result = emulate(kernels, variant, x, w, extras)
        assert torch.equal(result.view(tokens, region.m), region.reference(x, w, extras))


@pytest.mark.parametrize(("m", "k", "tokens"), [(1, 1, 1), (3, 33, 2), (33, 129, 5), (31, 600, 9)])
def test_shapes_that_fit_no_tile(m: int, k: int, tokens: int) -> None:
    region = Region(m, k, "f32", ("residual",))
    x, w, extras = region.operands(tokens)
    kernels = compiled(region, SCHEDULE)
    for variant in kernels.launches:
        assert_near(emulate(kernels, variant, x, w, extras), region.reference(x, w, extras))


def test_a_weight_that_is_stored_transposed() -> None:
    region = Region(33, 129, "f32", ("bias",), transposed=True)
    x, w, extras = region.operands(3)
    assert_near(emulate(compiled(region, SCHEDULE), "t4", x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_empty_and_full_weights(density: float) -> None:
    region = Region(9, 300, "f32")
    x, w, extras = region.operands(3, density)
    assert_near(emulate(compiled(region, SCHEDULE), "t4", x, w, extras), region.reference(x, w, extras))


def test_infinity_reaches_the_results_that_depend_on_it_only() -> None:
    region = Region(6, 40, "f32")
    x, w, extras = region.operands(2)
    x[0, 7] = torch.inf
    w[:, 7] = 0
    w[3, 7], w[3, 8:] = 1, 0
    result = emulate(compiled(region, SCHEDULE), "t4", x, w, extras)
    assert torch.isinf(result).nonzero().tolist() == [[0, 3]] and not torch.isnan(result).any()


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_warps(seed: int) -> None:
    region = Region(12, 300, "bf16", ("bias",))
    x, w, extras = region.operands(4)
    assert_near(emulate(compiled(region, SCHEDULE), "t4", x, w, extras, seed=seed), region.reference(x, w, extras))


@pytest.mark.parametrize(
    ("pattern", "replacement", "number"),
    [
        (r"bar\.sync\s+0;", "", 0),
        (r"shfl\.sync\.bfly\.b32 (\s*%r\d+)[^,]*, (%r\d+), 16, [^;]*;", r"mov.b32 \1, \2;", 0),
        (r"shfl\.sync\.bfly\.b32 (\s*%r\d+)[^,]*, (%r\d+), 1, [^;]*;", r"mov.b32 \1, \2;", 0),
        (r"(st\.shared[^\[]*\[%rd\d+)\]", r"\1+4]", 0),
        (r"min\.u64 (\s*%rd\d+), (%rd\d+), [^;]*;", r"mov.b64 \1, \2;", -1),
    ],
    ids=["no barrier", "half a warp", "no neighbours", "shifted", "unclamped"],
)
def test_planted_faults_are_caught(pattern: str, replacement: str, number: int) -> None:
    region = Region(6, 700, "f32")
    x, w, extras = region.operands(3)
    kernels = compiled(region, SCHEDULE)
    broken = planted(kernels.ptx, pattern, replacement, number)
    with pytest.raises((Fault, AssertionError)):
        assert_near(emulate(kernels, "t1", x, w, extras, ptx=broken), region.reference(x, w, extras))


@pytest.mark.parametrize(("element", "capability"), [("f32", 80), ("f32", 90), ("f32", 100), ("bf16", 90)])
def test_the_assembler_takes_the_kernel(element: str, capability: int) -> None:
    kernels = compiled(Region(4096, 4096, element, ("bias", "gelu")), SCHEDULE, capability)
    usage = assembled(kernels.ptx, capability)
    assert set(usage) == set(kernels.kernels.launches)
    assert all(kernel.registers <= 64 and kernel.spilled == 0 for kernel in usage.values())
    assert no_generic_access(kernels.ptx)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_assembler_takes_the_kernel_of_integers(capability: int) -> None:
    kernels = compiled(Int8Region(4096, 4096), SCHEDULE, capability)
    usage = assembled(kernels.ptx, capability)
    assert all(kernel.registers <= 40 and kernel.spilled == 0 for kernel in usage.values())
    assert kernels.ptx.count("redux.sync.add.s32") == 2 * (4 + 1) and "shfl" not in kernels.ptx
    assert no_generic_access(kernels.ptx)


def test_what_does_not_fit_into_shared_memory() -> None:
    assert list(compiled(Region(8, 20000, "f32"), SCHEDULE).launches) == ["t1"]
    with pytest.raises(CompileError, match="no gpu-gather schedule"):
        pipelines.plan(Region(8, 50000, "f32").text(), SCHEDULE, gpu_pipelines.WARP_BITS)
