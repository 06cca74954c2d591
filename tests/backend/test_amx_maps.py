"""Weights without a pattern on AMX, whose instructions are emulated: expanded to tiles, of bytes and in chains; attention."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from gossamer.dialects.errors import CompileError
from gossamer.dialects.packing import TileMap
from gossamer.passes import pipelines
from gossamer.runtime import jit
from gossamer.runtime.target import Target, host
from gossamer.sparsity.compiler.compile_kernel import compile_region
from tests.amx_emulator import believe, emulate
from tests.backend.harness import compile_and_run, prune_
from tests.backend.test_quantized import bytes_of, check, contract_of, kernel_of

pytestmark = pytest.mark.skipif(
    not {"avx512vbmi2", "bf16dots"} <= host().instructions, reason="what is around AMX's tiles is AVX-512"
)
LENGTHS = [1, 16, 37, 64, 100, 131]
WIDTH = 64


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """This machine, as if it had AMX, and no other schedule in chains."""
    target = emulate(monkeypatch, "amx-bf16", "amx-int8")
    believe(target, monkeypatch)
    monkeypatch.setattr("gossamer.backend.chains.chain_cost.runs_in_chains", lambda name, matrix: name == "amxexpand")
    monkeypatch.setattr("gossamer.backend.weights.plan.chain_pays", lambda *_: True)
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield target
    torch.set_num_threads(threads)


def scattered(m: int, k: int, density: float) -> Tensor:
    return bytes_of(m, k) * (torch.rand(m, k) < density)


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("m", "k"), [(16, 64), (70, 101), (96, 320), (1, 1)])
def test_sums_are_exact(m: int, k: int, density: float, amx: Target) -> None:
    for stored in ("MK", "KM"):
        weight = scattered(m, k, density)
        given = weight if stored == "MK" else weight.t().contiguous()
        kernel, packed = kernel_of(given, "amxexpand", stored, amx)
        assert packed.format == TileMap(1 if stored == "MK" else 0, 64)
        for count, tokens in enumerate((33, 1, 2, 15, 16, 17, 32, 64, 75, 0)):
            torch.set_num_threads(1 + count % 2)
            check(kernel, packed, weight, tokens)
        packed.refresh(given // 2)
        check(kernel, packed, weight // 2, 7)


def test_no_tile_is_spilled() -> None:
    named = Target.named("amx")
    planned = pipelines.plan(
        contract_of(scattered(256, 256, 0.3), "MK", named), "amxexpand", named.vector_bits, features=named.instructions
    )
    module = jit.optimize(pipelines.lower(planned, named.rounds_to_bf16).llvm_ir, named)
    lines = jit.assembly(module, named).split("\nregion_tile64:")[1].split(".Lfunc_end")[0].split("\n")
    counts = {name: sum(name in line for line in lines) for name in ("vpexpandb", "tdpbsud", "tdpbssd", "tilestored")}
    # In the loop, and for the tile that is left when it ends.
    assert counts == {"vpexpandb": 32, "tdpbsud": 8, "tdpbssd": 2, "tilestored": 5}


@pytest.mark.parametrize(("target", "columns"), [("avx512", 64), ("amx", 0)])
def test_what_has_no_instructions_or_no_tiles_is_refused(target: str, columns: int) -> None:
    named = Target.named(target)
    with pytest.raises(CompileError, match="no amxexpand schedule"):
        compile_region(contract_of(bytes_of(64, columns), "MK", named), schedule="amxexpand", target=named)


class Block(nn.Module):
    """Projections, attention with a mask or none, and what follows it."""

    def __init__(self, head: int, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.causal = head, causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(-2))


def compare(block: nn.Module, *inputs: Tensor | None, tolerance: float = 2e-2) -> None:
    """What a chain of tiles gives against float64."""
    torch._dynamo.reset()
    run = compile_and_run(block.bfloat16(), *inputs, regions=2)
    assert [(d.schedule, d.reason) for d in run.regions] == [("amxexpand", "in a chain of 2")] * 2
    given = [x.double() if x is not None and x.is_floating_point() else x for x in inputs]
    expected = block.double()(*given)
    torch.testing.assert_close(run.output.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("narrow", "wide"), [(64, 96), (80, 112), (96, 1600)])
def test_weights_are_expanded_once_for_several_tiles(narrow: int, wide: int, threads: int, amx: Target) -> None:
    """With rows that are no whole number of 32, columns that end between the parts of an epilogue, and a last tile that is
    narrower than the others."""
    torch.set_num_threads(threads)
    model = prune_(nn.Sequential(nn.Linear(narrow, wide), nn.GELU(), nn.Linear(wide, narrow)), 0.3).eval()
    for tokens in (33, 100, 300, 600):
        compare(model, torch.randn(tokens, narrow).bfloat16())


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("head", "causal"), [(32, False), (32, True), (64, False), (16, False)], ids=str)
def test_attention_of_any_length(head: int, causal: bool, length: int, amx: Target) -> None:
    """Heads of 16 have no whole tile: they are multiplied by pairs."""
    compare(prune_(Block(head, causal), 0.3).eval(), torch.randn(2, length, WIDTH).bfloat16())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["keys", "queries"])
@pytest.mark.parametrize("length", [37, 100])
def test_masks(length: int, kind: str, amx: Target) -> None:
    """One query of the first sequence sees nothing."""
    keep = torch.rand(2, 1, 1 if kind == "keys" else length, length) < 0.7
    keep[..., 0] = True
    if kind == "queries":
        keep[0, 0, 3] = False
    mask = torch.zeros(keep.shape).masked_fill(~keep, -1e4).bfloat16()
    compare(prune_(Block(32), 0.3).eval(), torch.randn(2, length, WIDTH).bfloat16(), mask)


@torch.no_grad()
def test_what_comes_later_stays_hidden(amx: Target) -> None:
    """A NaN reaches no token before its own."""
    block, x = prune_(Block(32, causal=True), 0.3).eval().bfloat16(), torch.randn(1, 150, WIDTH).bfloat16()
    clean = compile_and_run(block, x, regions=2)
    assert [d.reason for d in clean.regions] == ["in a chain of 2"] * 2
    for at in (149, 100, 20):
        spoiled = x.clone()
        spoiled[0, at] = torch.nan
        found = clean.function(spoiled)
        torch.testing.assert_close(found[:, :at], clean.output[:, :at], rtol=0, atol=0)
        assert found[:, at:].isnan().all()


@torch.no_grad()
@pytest.mark.parametrize("width", [64, 192])
def test_chains_of_bytes(width: int, amx: Target) -> None:
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 48))
    model = gossamer.quantize(prune_(model, 0.3)).eval()
    x = torch.randn(2, 40, 64)
    torch._dynamo.mark_dynamic(x, 1)
    run = compile_and_run(model, x, regions=2)
    assert [(d.schedule, d.reason) for d in run.regions] == [("amxexpand", "in a chain of 2")] * 2
    for tokens in (40, 1, 77, 130, 0):
        x = torch.randn(2, tokens, 64)
        torch.testing.assert_close(run.function(x), model(x), rtol=1e-5, atol=1e-5)
    model[0].weight_int8.copy_(model[0].weight_int8.roll(1, 1))
    torch.testing.assert_close(run.function(x), model(x), rtol=1e-5, atol=1e-5)
