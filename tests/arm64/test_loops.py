"""The innermost loops of kernels for 64-bit ARM: nothing is spilled, and how many instructions a multiply-add takes."""

import re

import pytest

from gossamer.passes import pipelines
from gossamer.runtime import jit
from gossamer.runtime.target import Target
from tests.backend.test_quantized import bytes_of, contract_of
from tests.backend.test_targets import innermost_loops
from tests.contracts import Region

MACHINES = ["neoverse-n1", "apple-m1"]
MULTIPLY_ADD = r"\s(fmla|sdot|bfdot)\b"
BLOCKS = {"block": (4, 4), "blockvec": (4, 4)}
WIDEST = {
    ("broadcast", "f32"): ("tile32", 32, 62),
    ("broadcast", "f64"): ("tile16", 32, 62),
    ("broadcast", "bf16"): ("tile32", 32, 63),
    ("broadcast", "f16"): ("tile32", 32, 63),
    ("rowpairs", "f32"): ("tile16", 32, 73),
    ("rowpairs", "f64"): ("tile8", 32, 73),
    ("block", "f32"): ("tile16", 64, 87),
    ("blockvec", "f32"): ("vectors8", 32, 54),
    ("quads", "i8"): ("tile16", 16, 44),
    ("pairs", "bf16"): ("tile16", 8, 40),
}
"""Of the widest tile: the function, and how many multiply-adds and instructions its loop over nonzeros has at most."""


def assembly(schedule: str, element: str, target: Target) -> str:
    """Of a product with a weight of 100 x 400, with labels as Linux has them."""
    if element == "i8":
        contract = contract_of(bytes_of(100, 400, density=0.1), "MK", target)
    else:
        contract = Region(100, 400, element, ("bias",), density=0.1, block=BLOCKS.get(schedule)).text()
    plan = pipelines.plan(contract, schedule, target.vector_bits, features=target.instructions, l1d=64 << 10)
    text = jit.assembly(jit.optimize(pipelines.lower(plan, target.rounds_to_bf16).llvm_ir, target), target)
    return (
        re.sub(r"\bL(BB|func_end)", r".L\1", re.sub(r"^_", "", text, flags=re.MULTILINE)) if "apple" in target.triple else text
    )


def products(text: str, function: str) -> list[list[str]]:
    """The instructions of each innermost loop of a function that multiplies."""
    loops = [[line for line in loop if re.match(r"\s+[a-z]", line)] for loop in innermost_loops(text, function)]
    return [loop for loop in loops if any(re.search(MULTIPLY_ADD, line) for line in loop)]


@pytest.mark.parametrize(
    ("schedule", "element", "machine"),
    [(*kind, machine) for kind in WIDEST for machine in (["neoverse-v1"] if kind[0] == "pairs" else MACHINES)],
)
def test_sums_stay_in_registers(schedule: str, element: str, machine: str) -> None:
    target = Target.named(machine)
    text, (function, multiply_adds, instructions) = assembly(schedule, element, target), WIDEST[schedule, element]
    functions = re.findall(r"^(region\w*):", text, re.MULTILINE)
    loops = [loop for name in functions if name != "region" for loop in products(text, name)]
    assert not [line for loop in loops for line in loop if re.search(r"\[sp\b|^\s+st\w*\s", line)]
    counts = [
        (sum(bool(re.search(MULTIPLY_ADD, line)) for line in loop), len(loop)) for loop in products(text, f"region_{function}")
    ]
    assert any(found == multiply_adds and length <= instructions for found, length in counts), counts


@pytest.mark.parametrize("machine", MACHINES)
def test_bytes_are_multiplied_by_one_instruction(machine: str) -> None:
    assert "sdot" in assembly("quads", "i8", Target.named(machine))
    assert "sdot" not in assembly("quads", "i8", Target.named("neon"))
