"""Blocks of int8 on AMX: sums bit for bit those of integers, by instructions that are emulated here, alone and in chains."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.dialects.errors import CompileError
from gossamer.dialects.packing import Panels
from gossamer.passes import pipelines
from gossamer.runtime import jit
from gossamer.runtime.target import Target, host
from gossamer.sparsity.compiler.compile_kernel import compile_region
from tests.amx_emulator import believe, emulate
from tests.backend.harness import compile_and_run, prune_
from tests.backend.test_quantized import bytes_of, check, contract_of, kernel_of

pytestmark = pytest.mark.skipif(host().vector_bits < 512, reason="what is around AMX's tiles is AVX-512")
in_chains = pytest.mark.skipif("bytedots" not in host().instructions, reason="chains need dot products of bytes")
optimize = jit.optimize
BLOCKS = [(32, 4), (16, 4), (32, 32), (16, 64), (64, 64)]


@pytest.fixture(autouse=True)
def amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """This machine, as if it had AMX-INT8, whose instructions are emulated."""
    target = emulate(monkeypatch, "amx-int8")
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield target
    torch.set_num_threads(threads)


def in_blocks(m: int, k: int, block: tuple[int, int], density: float) -> Tensor:
    kept = torch.rand(-(-m // block[0]), -(-k // block[1])) < density
    return bytes_of(m, k) * kept.repeat_interleave(block[0], 0)[:m].repeat_interleave(block[1], 1)[:, :k]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize(("m", "k"), [(64, 64), (96, 320), (70, 101)])
def test_sums_are_exact(m: int, k: int, block: tuple[int, int], amx: Target) -> None:
    for stored in ("MK", "KM"):
        weight = in_blocks(m, k, block, 0.4)
        given = weight if stored == "MK" else weight.t().contiguous()
        kernel, packed = kernel_of(given, "amxquads", stored, amx, block=block, fill=1.0)
        assert isinstance(packed.format, Panels)
        assert packed.format.rows == min(block[0], 32)
        assert packed.format.width == (64 if block[1] == 64 else 4)
        for count, tokens in enumerate((33, 1, 2, 15, 16, 17, 32, 64, 75, 0)):
            torch.set_num_threads(1 + count % 2)
            check(kernel, packed, weight, tokens)
        packed.refresh(given // 2)
        check(kernel, packed, weight // 2, 7)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_nothing_and_everything_stored(density: float, amx: Target) -> None:
    weight = in_blocks(64, 192, (32, 4), density)
    kernel, packed = kernel_of(weight, "amxquads", target=amx, block=(32, 4), fill=1.0)
    for tokens in (5, 40):
        check(kernel, packed, weight, tokens)


@pytest.mark.parametrize("block", [(16, 4), None], ids=str)
def test_the_reference_gives_the_same(block: tuple[int, int] | None, amx: Target) -> None:
    weight, x = in_blocks(64, 96, block or (1, 1), 0.3), bytes_of(19, 96)
    found = []
    for schedule in (scheduled(block), "reference"):
        kernel, packed = kernel_of(weight, schedule, target=amx, block=block, fill=1.0)
        found.append(torch.full((19, 64), torch.nan))
        kernel([x, packed], found[-1])
    assert torch.equal(*found)


@pytest.mark.parametrize("block", [(16, 64), None], ids=str)
def test_the_largest_sums_fit(block: tuple[int, int] | None, amx: Target) -> None:
    k = 40_000
    for value, factor in ((-128, -128), (127, -128), (-128, 127)):
        w, x = torch.full((16, k), value, dtype=torch.int8), torch.full((3, k), factor, dtype=torch.int8)
        kernel, packed = kernel_of(w, scheduled(block), target=amx, block=block, fill=1.0)
        y = torch.empty(3, 16)
        kernel([x, packed], y)
        assert torch.equal(y, torch.full((3, 16), float(k * value * factor)))


def scheduled(block: tuple[int, int] | None) -> str:
    """What multiplies such blocks, or no blocks."""
    if block is None and "avx512vbmi2" not in host().instructions:
        pytest.skip("expands bytes by AVX512-VBMI2")
    return "amxexpand" if block is None else "amxquads"


@pytest.mark.parametrize(("block", "products", "loads"), [((32, 32), 4, 4), ((16, 64), 2, 3)], ids=str)
def test_products_are_of_tiles_which_are_configured_once(block: tuple[int, int], products: int, loads: int) -> None:
    named = Target.named("amx")
    contract = contract_of(in_blocks(256, 256, block, 0.5), "MK", named, block=block, fill=1.0)
    planned = pipelines.plan(contract, "amxquads", named.vector_bits, features=named.instructions)
    text = jit.assembly(optimize(pipelines.lower(planned, named.rounds_to_bf16).llvm_ir, named), named)
    lines = text.split("\nregion_tile32:")[1].split(".Lfunc_end")[0].split("\n")
    counts = {name: sum(name in line for line in lines) for name in ("tdpbssd", "tileloadd", "tilestored", "ldtilecfg")}
    assert counts == {"tdpbssd": products, "tileloadd": loads, "tilestored": products, "ldtilecfg": 1}  # no tile is spilled
    assert len(set(re.findall(r"%tmm\d", "\n".join(lines)))) <= 8


def test_products_of_tiles_are_compiled_at_every_level() -> None:
    """LLVM by itself ends the process at level 0."""
    named = replace(Target.named("amx"), level=0)
    contract = contract_of(in_blocks(256, 256, (32, 32), 0.5), "MK", named, block=(32, 32), fill=1.0)
    planned = pipelines.plan(contract, "amxquads", named.vector_bits, features=named.instructions)
    text = jit.assembly(optimize(pipelines.lower(planned, named.rounds_to_bf16).llvm_ir, named), named)
    assert re.search(r"\ttdpbssd\t%tmm", text)


@pytest.mark.parametrize("block", [None, (8, 4), (16, 2)], ids=str)
def test_blocks_that_do_not_fill_tiles_are_refused(block: tuple[int, int] | None, amx: Target) -> None:
    contract = contract_of(bytes_of(64, 64), "MK", amx, block=block, fill=1.0)
    with pytest.raises(CompileError, match="no amxquads schedule"):
        compile_region(contract, schedule="amxquads", target=amx)


def test_a_machine_without_the_instructions_is_refused() -> None:
    named = Target.named("avx512")
    with pytest.raises(CompileError, match="no amxquads schedule"):
        compile_region(contract_of(bytes_of(64, 64), "MK", named, block=(32, 32), fill=1.0), schedule="amxquads", target=named)


@pytest.fixture
def everywhere(amx: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend takes this machine for one with AMX-INT8."""
    believe(amx, monkeypatch)


def quantized(block: tuple[int, int]) -> nn.Module:
    model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 256)).eval()
    return gossamer.quantize(prune_(model, 0.3, block))


@torch.no_grad()
@pytest.mark.parametrize("block", [(32, 32), (16, 4), (64, 64)], ids=str)
def test_layers_pruned_in_blocks_and_quantized(block: tuple[int, int], everywhere: None) -> None:
    model, x = quantized(block), torch.randn(3, 25, 256)
    run = compile_and_run(model, x, regions=2, schedule="amxquads", dynamic=True)
    assert [d.schedule for d in run.regions] == ["amxquads"] * 2
    for tokens in (25, 1, 40):
        x = torch.randn(3, tokens, 256)
        x[0, 0, 0] = torch.nan
        torch.testing.assert_close(run.function(x), model(x), rtol=1e-4, atol=1e-4, equal_nan=True)


@in_chains
@torch.no_grad()
@pytest.mark.parametrize("block", [(32, 32), (16, 4), (64, 64)], ids=str)
def test_chains_of_blocks(block: tuple[int, int], everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before bytes, GELU is an approximation, so that a few bytes are the next ones."""
    monkeypatch.setattr("gossamer.backend.chains.chain_cost.runs_in_chains", lambda name, matrix: name == "amxquads")
    monkeypatch.setattr("gossamer.backend.weights.plan.chain_pays", lambda *_: True)
    model, x = quantized(block), torch.randn(2, 40, 256)
    torch._dynamo.mark_dynamic(x, 1)
    run = compile_and_run(model, x, regions=2)
    assert [(d.schedule, d.reason) for d in run.regions] == [("amxquads", "in a chain of 2")] * 2
    for tokens in (40, 1, 77, 0):
        x = torch.randn(2, tokens, 256)
        torch.testing.assert_close(run.function(x), model(x), rtol=5e-3, atol=5e-3)
