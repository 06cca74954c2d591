"""The product of 2:4 weights on sparse tensor cores, run in the emulator and assembled by NVIDIA's assembler."""

from dataclasses import dataclass

import pytest
import torch

from gossamer.dialects.errors import CompileError, FormatError
from gossamer.dialects.gpu_packings import TwoFour
from gossamer.passes import gpu_pipelines, pipelines
from gossamer.runtime.packing import pack
from tests.contracts import Region, assert_near
from tests.gpu.assembler import assembled
from tests.gpu.emulator import Fault
from tests.gpu.kernels import compiled, emulate, no_generic_access, planted

SCHEDULE = "gpu-twofour"


@dataclass(frozen=True)
class Pruned(Region):
    """A region whose weight is pruned to 2:4, which a hint says."""

    def text(self) -> str:
        name = ", #CSR>" if "{kernel" not in super().text() else "#"
        return super().text().replace(name, name + " {kernel.nm = [2 : i64, 4 : i64]}", 1)

    def operands(self, tokens: int, density: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        x, w, extras = super().operands(tokens, density)
        by_rows = w.t() if self.transposed else w
        groups = torch.nn.functional.pad(by_rows, (0, -self.k % 4)).reshape(self.m, -1, 4).clone()
        dropped = torch.rand(groups.shape).argsort(2)[..., :2]
        pruned = groups.scatter(2, dropped, 0).view(self.m, -1)[:, : self.k]
        return x, (pruned.t() if self.transposed else pruned).contiguous(), extras


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("variant", ["t128", "t32"])
@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_a_layer_with_an_epilogue(element: str, variant: str) -> None:
    region = Pruned(136, 192, element, ("bias", "relu"))
    x, w, extras = region.operands(40)
    assert_near(emulate(compiled(region, SCHEDULE), variant, x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize(("m", "k", "tokens"), [(1, 8, 1), (63, 72, 33), (129, 136, 40)])
def test_shapes_that_fit_no_tile(m: int, k: int, tokens: int) -> None:
    region = Pruned(m, k, "bf16", ("residual",))
    x, w, extras = region.operands(tokens, 0.8)
    kernels = compiled(region, SCHEDULE)
    for variant in kernels.launches:
        assert_near(emulate(kernels, variant, x, w, extras), region.reference(x, w, extras))


def test_a_weight_that_is_stored_transposed() -> None:
    region = Pruned(48, 64, "bf16", transposed=True)
    x, w, extras = region.operands(9)
    assert_near(emulate(compiled(region, SCHEDULE), "t32", x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_warps(seed: int) -> None:
    region = Pruned(70, 200, "bf16", ("bias",))
    x, w, extras = region.operands(9)
    assert_near(emulate(compiled(region, SCHEDULE), "t32", x, w, extras, seed=seed), region.reference(x, w, extras))


@pytest.mark.parametrize(
    ("pattern", "replacement", "number"),
    [
        (r"bar\.sync\s+0;", "", 0),
        (r"cp\.async\.wait_group\s+1;", "", 0),
        (r"(mma\.sp[^;]*,\s+)1;", r"\g<1>0;", 0),
        (r"(ld\.shared\.b32[^\[]*\[%rd\d+)[^\]]*\]", r"\1+8]", 0),
        (r"(ldmatrix[^\[]*\[%rd\d+)\]", r"\1+16]", 0),
        (r"xor\.b64 (\s*%rd\d+), (%rd\d+), [^;]*;", r"mov.b64 \1, \2;", 1),
    ],
    ids=["no barrier", "no wait", "other lanes", "other metadata", "shifted", "not swizzled"],
)
def test_planted_faults_are_caught(pattern: str, replacement: str, number: int) -> None:
    region = Pruned(40, 264, "bf16")
    x, w, extras = region.operands(20)
    kernels = compiled(region, SCHEDULE)
    broken = planted(kernels.ptx, pattern, replacement, number)
    with pytest.raises((Fault, AssertionError)):
        assert_near(emulate(kernels, "t32", x, w, extras, ptx=broken), region.reference(x, w, extras))


@pytest.mark.parametrize(("element", "capability"), [("bf16", 80), ("bf16", 90), ("bf16", 100), ("f16", 90)])
def test_the_assembler_takes_the_kernel(element: str, capability: int) -> None:
    kernels = compiled(Pruned(4096, 4096, element, ("bias", "gelu")), SCHEDULE, capability)
    usage = assembled(kernels.ptx, capability)
    assert set(usage) == set(kernels.kernels.launches)
    assert all(kernel.registers <= 200 and kernel.spilled <= 16 for kernel in usage.values())
    assert all(launch.shared <= 99 * 1024 for launch in kernels.launches.values())
    instruction = f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{element}.{element}.f32"
    assert kernels.ptx.count(instruction) == 2 * 2 * 4 * 4
    assert no_generic_access(kernels.ptx)


def test_the_packing_keeps_two_of_four() -> None:
    w = torch.zeros(3, 8)
    w[0, 1], w[0, 2], w[1, 7] = 5, 6, 7
    packed = pack(w, TwoFour(1))
    assert packed.values.view(128, 32)[:3, :4].tolist() == [[5, 6, 0, 0], [0, 0, 0, 7], [0, 0, 0, 0]]
    words = packed.components[0].view(2, 2, 2, 32)
    # Row 0 is row g = 0 of tile 0, row 1 is row 8 of it: places 1, 2, then 0, 1; and 0, 1, then 0, 3.
    assert words[0, 0, 0, 0].item() & 0xFF == 0b0100_1001 and words[0, 0, 0, 0].item() >> 16 & 0xFF == 0b1100_0100


def test_a_weight_with_three_of_four() -> None:
    w = torch.zeros(3, 8)
    w[1, 4:7] = 1
    with pytest.raises(FormatError, match=r"row 1 has more than 2 nonzeros in columns 4 to 7, prune it to 2:4"):
        pack(w, TwoFour(1))


@pytest.mark.parametrize("region", [Region(32, 32, "bf16"), Pruned(32, 32, "f32"), Pruned(32, 36, "bf16")])
def test_what_has_no_such_kernel(region: Region) -> None:
    with pytest.raises(CompileError, match="no gpu-twofour schedule"):
        pipelines.plan(region.text(), SCHEDULE, gpu_pipelines.WARP_BITS)
