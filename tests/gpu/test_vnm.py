"""The product of V:N:M weights on sparse tensor cores, run in the emulator and assembled by NVIDIA's assembler."""

from dataclasses import dataclass

import pytest
import torch

from gossamer.dialects.errors import CompileError, FormatError
from gossamer.dialects.gpu_packings import Vnm
from gossamer.passes import gpu_pipelines, pipelines
from gossamer.runtime.packing import pack
from tests.contracts import Region, assert_near
from tests.gpu.assembler import assembled
from tests.gpu.emulator import Fault
from tests.gpu.kernels import compiled, emulate, no_generic_access, planted

SCHEDULE = "gpu-vnm"


@dataclass(frozen=True)
class Pruned(Region):
    """A region whose weight is pruned to V:N:M, which a hint says."""

    vnm: tuple[int, int, int] = (128, 2, 8)

    def text(self) -> str:
        numbers = ", ".join(f"{n} : i64" for n in self.vnm)
        return super().text().replace(", #CSR>", f", #CSR> {{kernel.vnm = [{numbers}]}}", 1)

    def operands(self, tokens: int, density: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        x, w, extras = super().operands(tokens, density)
        v, _, m = self.vnm
        edges = (0, -self.k % m, 0, -self.m % v)
        parts = torch.nn.functional.pad(w.t() if self.transposed else w, edges).view(-1, v, (self.k + edges[1]) // m, m)
        columns = torch.rand(parts.shape[0], 1, *parts.shape[2:]).argsort(3)[..., :4].expand(-1, v, -1, -1)
        kept = columns.gather(3, torch.rand(columns.shape).argsort(3)[..., :2])
        pruned = torch.zeros_like(parts).scatter(3, kept, parts.gather(3, kept)).view(self.m + edges[3], -1)
        pruned = pruned[: self.m, : self.k]
        return x, (pruned.t() if self.transposed else pruned).contiguous(), extras


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("element", "vnm", "variant"),
    [("bf16", (128, 2, 8), "t128"), ("f16", (64, 2, 16), "t64"), ("bf16", (64, 2, 8), "t64"), ("f16", (256, 2, 16), "t64")],
)
def test_a_layer_with_an_epilogue(element: str, vnm: tuple[int, int, int], variant: str) -> None:
    region = Pruned(136, 264, element, ("bias", "relu"), vnm=vnm)
    x, w, extras = region.operands(20)
    assert_near(emulate(compiled(region, SCHEDULE), variant, x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize(("m", "k", "tokens"), [(1, 8, 1), (63, 136, 33), (129, 72, 65)])
def test_shapes_that_fit_no_tile(m: int, k: int, tokens: int) -> None:
    region = Pruned(m, k, "bf16", ("residual",))
    x, w, extras = region.operands(tokens, 0.8)
    assert_near(emulate(compiled(region, SCHEDULE), "t64", x, w, extras), region.reference(x, w, extras))


def test_a_weight_that_is_stored_transposed() -> None:
    region = Pruned(48, 64, "bf16", transposed=True)
    x, w, extras = region.operands(9)
    assert_near(emulate(compiled(region, SCHEDULE), "t64", x, w, extras), region.reference(x, w, extras))


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_warps(seed: int) -> None:
    region = Pruned(70, 264, "bf16", ("bias",))
    x, w, extras = region.operands(9)
    assert_near(emulate(compiled(region, SCHEDULE), "t64", x, w, extras, seed=seed), region.reference(x, w, extras))


FAULTS = {
    "no barrier": (r"bar\.sync\s+0;", "", -1),
    "no wait": (r"cp\.async\.wait_group\s+0;", "", 0),
    "other lanes": (r"(mma\.sp[^;]*,\s+)1;", r"\g<1>0;", 0),
    "not transposed": (r"(ldmatrix\.sync\.aligned\.m8n8\.x4)\.trans", r"\1", 0),
    "shifted": (r"(ldmatrix[^\[]*\[%rd\d+)[^\]]*\]", r"\1+32]", 0),
    "not swizzled": (r"xor\.b64 (\s*%rd\d+), (%rd\d+), [^;]*;", r"mov.b64 \1, \2;", 0),
    "another column": (r"(st\.shared\.v2\.b16[^\[]*\[%rd\d+)[^\]]*\]", r"\1+256]", -1),
}


@pytest.mark.parametrize(("pattern", "replacement", "number"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_caught(pattern: str, replacement: str, number: int) -> None:
    region = Pruned(40, 136, "bf16")
    x, w, extras = region.operands(20)
    kernels = compiled(region, SCHEDULE)
    broken = planted(kernels.ptx, pattern, replacement, number, kernels.ptx.index("region_t64("))
    with pytest.raises((Fault, AssertionError)):
        assert_near(emulate(kernels, "t64", x, w, extras, ptx=broken, seed=0), region.reference(x, w, extras))


@pytest.mark.parametrize(
    ("element", "capability", "vnm"),
    [("bf16", 80, (128, 2, 8)), ("bf16", 100, (64, 2, 8)), ("f16", 90, (64, 2, 16))],
)
def test_the_assembler_takes_the_kernel(element: str, capability: int, vnm: tuple[int, int, int]) -> None:
    kernels = compiled(Pruned(4096, 4096, element, ("bias", "relu"), vnm=vnm), SCHEDULE, capability)
    usage = assembled(kernels.ptx, capability)
    assert set(usage) == set(kernels.kernels.launches)
    assert all(kernel.registers <= 255 and kernel.spilled <= 16 for kernel in usage.values())
    assert all(launch.shared <= 99 * 1024 for launch in kernels.launches.values())
    instruction = f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{element}.{element}.f32"
    assert kernels.ptx.count(instruction) == 2 * 2 * 4 * 4
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared" in kernels.ptx and "ld.global.nc.v4.b32" in kernels.ptx
    assert no_generic_access(kernels.ptx)


def test_the_packing_says_where_each_nonzero_lies() -> None:
    w = torch.zeros(70, 16)
    w[0, 1], w[0, 6], w[63, 7], w[64, 9] = 1, 2, 3, 4
    packed = pack(w, Vnm(1, 64, 8))
    places, _, values = packed.components
    assert places.view(2, 128)[0, :16].tolist() == [0, 1, -1, -1, -1, -1, 2, 3, 0, 1, 2, 3, -1, -1, -1, -1]
    assert values.view(128, 32)[[0, 63, 64], :4].tolist() == [[1, 2, 0, 0], [0, 3, 0, 0], [0, 0, 0, 4]]
    assert torch.equal(packed.unpack(), w)


def test_weights_that_are_not_pruned_so() -> None:
    w = torch.zeros(70, 16)
    w[torch.arange(65, 70), torch.arange(8, 13)] = 1
    with pytest.raises(FormatError, match=r"rows 64 to 69 have more than 4 columns .* in columns 8 to 15, prune it to 64:2:8"):
        pack(w, Vnm(1, 64, 8))
    w = torch.zeros(3, 8)
    w[1, 4:7] = 1
    with pytest.raises(FormatError, match=r"row 1 has more than 2 nonzeros in columns 0 to 7, prune it to 128:2:8"):
        pack(w, Vnm(1, 128, 8))


@pytest.mark.parametrize(
    "region", [Region(32, 32, "bf16"), Pruned(32, 32, "f32"), Pruned(32, 36, "bf16"), Pruned(32, 32, "bf16", vnm=(32, 2, 8))]
)
def test_what_has_no_such_kernel(region: Region) -> None:
    with pytest.raises(CompileError, match="no gpu-vnm schedule"):
        pipelines.plan(region.text(), SCHEDULE, gpu_pipelines.WARP_BITS)
