"""Code for other machines: what is in the innermost loops, and, where this machine can run it, what comes out."""

import dataclasses
import re

import pytest
import torch

from gossamer.dialects.errors import CompileError
from gossamer.passes import pipelines
from gossamer.runtime import jit
from gossamer.runtime.packing import pack
from gossamer.runtime.target import Target, host
from gossamer.sparsity.compiler.compile_kernel import compile_region
from gossamer.sparsity.compiler.labelled import labelled
from tests.contracts import Region, assert_near

TARGETS = ["avx2", "avx512", "amx", "neon"]

# A fused multiply-add on whole vectors, and a store of one.
FMA = {
    "avx2": r"vfmadd\d+p[sd]\s.*%ymm",
    "avx512": r"vfmadd\d+p[sd]\s.*%zmm",
    "amx": r"vfmadd\d+p[sd]\s.*%zmm",
    "neon": r"fmla\s+v\d+\.(4s|2d)",
}
STORE = r"^\s+(vmov\w+\s+%[xyz]mm\d+, .*\(.*\)|st[rp]\s+[qv]\d+|st1\s)"


@pytest.fixture(autouse=True)
def without_the_cache_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", "")
    torch.manual_seed(0)


def assembly(region: Region, schedule: str, target: Target) -> str:
    lowered = pipelines.lower(
        pipelines.plan(region.text(), schedule, target.vector_bits, features=target.instructions), target.rounds_to_bf16
    )
    return jit.assembly(jit.optimize(lowered.llvm_ir, target), target)


def innermost_loops(text: str, function: str) -> list[list[str]]:
    """The instructions between a label and a jump back to it, where no other such jump is between them."""
    body = re.split(r"\n\.Lfunc_end", text.split(f"\n{function}:")[1])[0].split("\n")
    labels = {match[1]: i for i, line in enumerate(body) if (match := re.match(r"(\.L\w+):", line))}
    jumps = [
        (labels[match[1]], i)
        for i, line in enumerate(body)
        if (match := re.match(r"\s+(?:j|b|cb|tb)[\w.]*\s.*?(\.L\w+)", line)) and labels.get(match[1], i) < i
    ]
    return [body[a : b + 1] for a, b in jumps if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in jumps)]


@pytest.mark.parametrize("element", ["f32", "f64", "bf16"])
@pytest.mark.parametrize("name", TARGETS)
def test_the_sums_of_a_tile_stay_in_registers(name: str, element: str) -> None:
    """In the loops over the nonzeros of a row all is loads and multiply-adds; the widest tile has two vectors of sums."""
    target = Target.named(name)
    text = assembly(Region(100, 400, element, ("bias", "gelu")), "broadcast", target)
    lanes = target.vector_bits // (64 if element == "f64" else 32)
    for vectors in (2, 1):
        loops = innermost_loops(text, f"region_tile{vectors * lanes}")
        # The loop over rows divides for gelu. It seems innermost where LLVM puts the loops over nonzeros behind it.
        loops = [loop for loop in loops if not any(re.search(r"\s(vdivp[sd]|fdiv)\s", line) for line in loop)]
        products = [loop for loop in loops if any(re.search(FMA[name], line) for line in loop)]
        counts = [sum(bool(re.search(FMA[name], line)) for line in loop) for loop in products]
        assert counts
        assert all(count % vectors == 0 for count in counts)
        assert not [line for loop in products for line in loop if re.search(STORE, line)]


@pytest.mark.parametrize("name", [*TARGETS, "apple-m1"])
def test_nothing_is_called_that_a_process_may_not_have(name: str) -> None:
    """LLVM would round to bf16 by a call where there is no instruction for it."""
    openmp, c_library = (
        {"GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"},
        {"erff", "malloc", "free", "memset", "memcpy", "bzero"},
    )
    for schedule in ("broadcast", "rowpairs", "reference"):
        text = assembly(Region(30, 40, "bf16", ("bias", "gelu", "residual")), schedule, Target.named(name))
        called = set(re.findall(r"^\s+(?:callq?|bl)\s+_?([A-Za-z]\w*)", text, re.MULTILINE))
        called -= set(re.findall(r"^_?(\w+):", text, re.MULTILINE))
        assert called <= (c_library if schedule == "reference" else openmp)


@pytest.mark.parametrize(("name", "instruction"), [("avx2", False), ("avx512", False), ("amx", True)])
def test_rounding_to_bf16_is_one_instruction_where_there_is_one(name: str, instruction: bool) -> None:
    text = assembly(Region(30, 40, "bf16"), "broadcast", Target.named(name))
    assert ("vcvtneps2bf16" in text) is instruction


LOOKED_UP = {"avx2": r"vperm(ps|d)\s.*%ymm", "avx512": r"vperm[it]2ps\s.*%zmm"}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_x_is_looked_up_in_registers(name: str) -> None:
    """In the loops over runs: a permutation for each multiply-add (two of narrow vectors), nothing gathered, nothing stored."""
    text = assembly(Region(100, 400, epilogue=("bias",)), "lookup", Target.named(name))
    for tokens in (1, 2):
        loops = innermost_loops(text, f"region_rows{tokens}")
        products = [loop for loop in loops if any(re.search(FMA[name], line) for line in loop)]
        assert products
        for loop in products:
            count = [sum(bool(re.search(pattern, line)) for line in loop) for pattern in (FMA[name], LOOKED_UP[name])]
            assert count[1] == count[0] * (2 if name == "avx2" else 1)
            assert not [line for line in loop if re.search(STORE, line) or "gather" in line]


def test_bytes_of_x_are_looked_up_in_registers() -> None:
    """Four planes and four multiply-adds a step, two instructions more a plane to put the bytes together."""
    loops = innermost_loops(assembly(Region(100, 400, epilogue=("bias",)), "planes", Target.named("amx")), "region_rows1")
    products = [loop for loop in loops if any(re.search(FMA["amx"], line) for line in loop)]
    assert products
    for loop in products:
        found = (r"vperm[it]2b\s.*%zmm", FMA["amx"], r"vpunpck[lh](bw|wd)\s.*%zmm", r"vpmovb2m|vpcmpgtb")
        planes, fmas, mixes, masks = (sum(bool(re.search(pattern, line)) for line in loop) for pattern in found)
        assert planes == fmas and mixes == 2 * fmas and 4 * masks == fmas
        assert not [line for line in loop if re.search(STORE, line)]


def test_values_are_loaded_four_at_a_time() -> None:
    text = assembly(Region(100, 400, epilogue=("bias",)), "broadcast", Target.named("avx512"))
    for tokens in (8, 16, 32):
        loops = innermost_loops(text, f"region_tile{tokens}")
        products = [loop for loop in loops if any(re.search(r"vfmadd\d+ps\s.*%[yz]mm", line) for line in loop)]
        assert products
        for loop in products:
            assert not [line for line in loop if re.search(r"vbroadcastss\s.*\(", line)]
            assert sum("vshufps" in line or "vpermilps" in line for line in loop) == 4


@pytest.mark.parametrize(
    ("schedule", "name"), [("lookup", "neon"), ("planes", "neon"), ("planes", "avx2"), ("planes", "avx512")]
)
def test_what_a_target_has_no_instruction_for(schedule: str, name: str) -> None:
    with pytest.raises(CompileError, match=f"no {schedule} schedule for a weight"):
        assembly(Region(100, 400), schedule, Target.named(name))


@pytest.mark.parametrize(
    ("schedule", "name", "element"),
    [("lookup", "avx2", "f32"), ("lookup", "avx512", "f32"), ("lookup", "avx512", "bf16")],
)
def test_the_numbers_of_schedules_with_instructions_of_their_own_are_right(schedule: str, name: str, element: str) -> None:
    target = Target.named(name)
    if not target.runs_here:
        pytest.skip(f"this machine does not run {name} code")
    check(Region(37, 210, element, ("bias", "gelu", "residual")), schedule, target)


@pytest.mark.parametrize("schedule", ["broadcast", "rowpairs", "reference"])
@pytest.mark.parametrize("element", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", TARGETS)
def test_the_numbers_are_right(name: str, element: str, schedule: str) -> None:
    target = Target.named(name)
    if not target.runs_here:
        pytest.skip(f"this machine does not run {name} code")
    check(Region(37, 210, element, ("bias", "gelu", "residual")), schedule, target)


@pytest.mark.parametrize("schedule", ["broadcast", "rowpairs"])
@pytest.mark.parametrize("element", ["f32", "f64", "bf16"])
def test_vectors_of_128_bits(element: str, schedule: str) -> None:
    check(Region(37, 210, element, ("bias", "gelu")), schedule, dataclasses.replace(host(), vector_bits=128))


def check(region: Region, schedule: str, target: Target) -> None:
    kernel = compile_region(region.text(), schedule=schedule, target=target)
    for tokens in (1, 29, 70):
        x, w, extras = region.operands(tokens)
        out = torch.full((tokens, region.m), torch.nan, dtype=region.dtype)
        assert kernel.formats[1] is not None
        kernel([x, pack(w, kernel.formats[1]), *extras], out)
        assert_near(out, region.reference(x, w, extras))


@pytest.mark.parametrize("name", TARGETS)
def test_a_dump_labels_the_inner_loops_that_multiply_with_their_schedule(name: str) -> None:
    target, region = Target.named(name), Region(100, 400, epilogue=("bias",))
    plan = pipelines.plan(region.text(), "rowpairs", target.vector_bits, features=target.instructions)
    module = jit.optimize(pipelines.lower(plan, target.rounds_to_bf16).llvm_ir, target)
    plain, text = jit.assembly(module, target), labelled(jit.assembly(module, target, comments=True), plan.text, plan.schedule)
    assert 'schedule = "rowpairs"' in text.partition("\n\t.file")[0]
    functions = [line.partition(":")[0] for line in plain.split("\n") if re.match(r"region\w*:", line)]
    loops = [loop for function in functions for loop in innermost_loops(plain, function)]
    counts = [sum(bool(re.search(FMA[name], line)) for line in loop) for loop in loops]
    found = re.findall(r"^(?:#|//) rowpairs: inner loop, (\d+) multiply-adds\n\.L", text, re.MULTILINE)
    assert sorted(map(int, found)) == sorted(count for count in counts if count)
