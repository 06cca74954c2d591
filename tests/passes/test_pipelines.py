"""The pipelines' two halves: kernel IR that says all the code depends on, and LLVM IR with what it takes to call it."""

import re

import pytest

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing, Padded, RowPairs
from gossamer.passes import pipelines
from gossamer.passes.pipelines import Lowered, Plan
from tests.contracts import STEPS, Region

OURS = ["broadcast", "rowpairs"]  # those for any weight on any target


def plan(region: Region, schedule: str = "broadcast", bits: int = 512) -> Plan:
    return pipelines.plan(region.text(), schedule, bits)


@pytest.mark.parametrize(
    ("schedule", "transposed", "expected"),
    [
        ("broadcast", False, Padded(1, 48)),
        ("broadcast", True, Padded(0, 48)),
        ("rowpairs", False, RowPairs(1, 40)),
        ("rowpairs", True, RowPairs(0, 40)),
        ("reference", False, Format.CSR),
        ("reference", True, Format.CSR),
    ],
)
def test_the_plan_says_how_the_weight_is_stored(schedule: str, transposed: bool, expected: Format | Packing) -> None:
    planned = plan(Region(24, 40, epilogue=("bias",), transposed=transposed), schedule)
    assert planned.formats == (None, expected, None)
    assert str(expected) in planned.text


@pytest.mark.parametrize("schedule", [*OURS, "reference"])
def test_hints_are_not_in_the_plan(schedule: str) -> None:
    plain = plan(Region(24, 40), schedule)
    assert plan(Region(24, 40, density=0.12, tokens=7), schedule).text == plain.text


@pytest.mark.parametrize("schedule", [*OURS, "reference"])
def test_a_plan_is_the_same_every_time(schedule: str) -> None:
    region = Region(24, 40, epilogue=("bias", "gelu", "residual"))
    assert plan(region, schedule).text == plan(region, schedule).text


@pytest.mark.parametrize("schedule", OURS)
def test_the_width_of_vectors_is_in_the_plan(schedule: str) -> None:
    texts = {plan(Region(24, 40), schedule, bits).text for bits in (128, 256, 512)}
    assert len(texts) == 3


@pytest.mark.parametrize("schedule", OURS)
@pytest.mark.parametrize("step", STEPS)
def test_one_op_is_left_of_a_region(step: str, schedule: str) -> None:
    """The product with its epilogue; the dimension that the importer asks for is gone with all that was fused."""
    text = plan(Region(24, 40, epilogue=("bias", step) if step != "bias" else ("bias",)), schedule).text
    assert text.count("kernel.spm") == 1
    assert "linalg" not in text
    assert "tensor.empty" not in text


@pytest.mark.parametrize("schedule", [*OURS, "reference"])
@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_narrow_floats_are_computed_with_in_f32(element: str, schedule: str) -> None:
    """One rounding, the last, as Inductor has it."""
    text = plan(Region(24, 40, element, ("bias", "gelu", "relu")), schedule).text
    assert text.count(f"f32 to {element}") == 1
    assert not re.findall(rf"(?:arith\.(?:add|sub|mul|div|max|min|neg|cmp)\w*|math\.\w+) .*: {element}$", text, re.MULTILINE)


def test_powers_are_products() -> None:
    assert "math.fpowi" not in plan(Region(24, 40, epilogue=("gelu_tanh",))).text


@pytest.mark.parametrize("schedule", [*OURS, "reference"])
def test_all_schedules_are_called_in_the_same_way(schedule: str) -> None:
    """x, the arrays of w, the bias (of a known size), the residual, the output, the workspace, the team's size."""
    lowered = pipelines.lower(plan(Region(24, 40, epilogue=("bias", "residual")), schedule))
    arrays = 4 if schedule == "rowpairs" else 3
    assert lowered.words == ((0,), *[(0,)] * arrays, (), (0,), (0,), (0,), ())
    assert "define void @entry(ptr" in lowered.llvm_ir


def test_the_workspace_holds_a_tile_of_x_and_a_panel_of_sums() -> None:
    """For 32 tokens, 48 columns of x (40, in whole vectors) and 16 rows of sums (1024 where columns are several panels),
    and a cache line between threads."""
    assert pipelines.lower(plan(Region(24, 40))).workspace == (48 + 16) * 32 * 4 + 64
    assert pipelines.lower(plan(Region(5000, 3000))).workspace == (3008 + 1024) * 32 * 4 + 64


def test_the_reference_needs_no_workspace() -> None:
    assert pipelines.lower(plan(Region(24, 40), "reference")).workspace == 0


@pytest.mark.parametrize("schedule", [*OURS, "reference"])
def test_rounding_to_bf16_is_an_instruction_or_spelled_out(schedule: str) -> None:
    def lowered(bf16: bool) -> Lowered:
        return pipelines.lower(plan(Region(24, 40, "bf16"), schedule), bf16)

    assert re.search(r"fptrunc .*float.* to .*bfloat", lowered(True).llvm_ir)
    assert not re.search(r"(fptrunc|fpext) .*bfloat", lowered(False).llvm_ir)


@pytest.mark.parametrize("schedule", [*OURS, "reference"])
def test_the_observer_sees_each_pass(schedule: str) -> None:
    seen: list[tuple[str, str]] = []
    planned = pipelines.plan(Region(24, 40).text(), schedule, 512, lambda stage, suffix, _: seen.append((stage, suffix)))
    first = len(seen)
    pipelines.lower(planned, observer=lambda stage, suffix, _: seen.append((stage, suffix)))
    assert seen[0] == ("keep-nan", "mlir")
    assert seen[first][0] == "expose-storage"
    assert seen[-1] == ("lower-to-llvm", "mlir")
    assert all(re.fullmatch(r"[a-z-]+", stage) for stage, _ in seen)


@pytest.mark.parametrize("text", ["func.func @region(", "func.func @region() { return %x }", "no MLIR at all"])
def test_text_that_does_not_parse(text: str) -> None:
    with pytest.raises(CompileError, match="the contract IR does not parse"):
        pipelines.plan(text, "broadcast", 512)


@pytest.mark.parametrize("schedule", OURS)
def test_an_op_that_cannot_be_lowered_is_named(schedule: str) -> None:
    """Without a word, the translation to LLVM IR would end the process."""
    text = Region(24, 40).text().replace("return ", "gpu.barrier\nreturn ")
    with pytest.raises(CompileError, match=rf"the {schedule} schedule cannot compile the region: gpu.barrier is left at"):
        pipelines.lower(pipelines.plan(text, schedule, 512))


def test_two_products_in_a_row_are_a_chain() -> None:
    lowered = pipelines.lower(pipelines.plan(two_products(), pipelines.CHAIN, 512))
    assert lowered.tile_workspace == (64, 0, 0)


@pytest.mark.parametrize("schedule", OURS)
def test_two_products_in_a_row_have_no_other_kernel(schedule: str) -> None:
    with pytest.raises(CompileError, match="has no buffer, for it is computed and used inside of the region"):
        pipelines.lower(pipelines.plan(two_products(), schedule, 512))


def two_products() -> str:
    text = Region(40, 40, transposed=True).text()
    product = next(line for line in text.splitlines() if line.startswith("%sums ="))
    again = product.replace("%sums", "%again").replace("ins(%x", "ins(%sums")
    return text.replace("return %sums", f"{again}\nreturn %again")
