"""The assembly in a dump names the schedule of a layer and labels its hot loop, for every schedule of CPUs.

Most kernels are compiled for a processor that can run all schedules. The machine that runs the tests does not run them.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.backend.report.dump import Dump
from gossamer.passes.schedules.families import FAMILIES
from gossamer.runtime.target import Target
from gossamer.sparsity.compiler.compile_kernel import compile_region
from tests.backend.harness import compile_and_run, prune_
from tests.contracts import Region
from tests.gpu.int8_region import Int8Region

AMX = Target.named("amx")
ALL = replace(AMX, features=f"{AMX.features},+avx512vnni,+avx512bw")
ROWS, COLUMNS = 96, 128
FMA, BF16_PAIRS, BYTES = r"vfmadd\d+[ps]s", "vdpbf16ps", "vpdpbusd"


@dataclass(frozen=True)
class Case:
    """A layer that a schedule can compute, and the instruction that multiplies in its hot loop."""

    multiply: str
    element: str = "f32"
    block: tuple[int, int] | None = None

    def contract(self) -> str:
        if self.element == "i8":
            return Int8Region(ROWS, COLUMNS, block=self.block or (1, 1)).text()
        return Region(ROWS, COLUMNS, self.element, ("bias",), density=0.2, block=self.block).text()


CASES = {
    "amx": Case("tdpbf16ps", "bf16", (32, 32)),
    "amxcolumns": Case("tdpbf16ps", "bf16", (32, 1)),
    "amxexpand": Case("tdpbf16ps", "bf16"),
    "amxquads": Case(r"tdpb\w+d", "i8", (32, 4)),
    "bf16dot": Case(BF16_PAIRS, "bf16", (16, 2)),
    "block": Case(FMA, block=(16, 1)),
    "blockvec": Case(FMA, block=(16, 1)),
    "broadcast": Case(FMA),
    "expand": Case(BF16_PAIRS, "bf16"),
    "lookup": Case(FMA),
    "lookup8": Case(BYTES, "i8"),
    "pairs": Case(BF16_PAIRS, "bf16"),
    "planes": Case(FMA),
    "quads": Case(BYTES, "i8"),
    "rowpairs": Case(FMA),
    "reference": Case(r"v?(mul|fmadd\d+)[ps]s"),
}
HERE = {"broadcast": 0, "rowpairs": 0, "block": 0, "blockvec": 0, "groups": 4, "reference": 0}
"""The schedules that every machine runs, and the bits of the weights that they want."""


def labelled_loops(text: str, schedule: str) -> list[tuple[str, int]]:
    """The instructions of each labelled loop, up to the next label of a loop, and the number of multiply-adds of its label."""
    _, *loops = re.split(rf"^(?:#|//) {schedule}: inner loop, (\d+) multiply-adds\n", text, flags=re.MULTILINE)
    return [(code, int(count)) for count, code in zip(loops[::2], loops[1::2], strict=True)]


def check(text: str, schedule: str, multiply: str) -> None:
    """The first line names the schedule. Labels are at heads of loops, to which an instruction jumps back."""
    assert re.match(rf'(?:#|//) Schedule "{schedule}"\. ', text)
    kernel_ir = text.partition("\n\t.file")[0]
    if schedule != "reference":
        assert f'schedule = "{schedule}"' in kernel_ir
    loops = labelled_loops(text, schedule)
    assert loops, "no loop is labelled"
    for code, count in loops:
        head = re.match(r"(\.?L\w+):", code)
        assert head and count > 0
        assert re.search(rf"^\s+[a-z][\w.]*\s(.*,\s*)?{re.escape(head[1])}$", text, re.MULTILINE), "nothing jumps back"
    assert any(re.search(rf"^\s+{multiply}\s", code, re.MULTILINE) for code, _ in loops)


def test_each_schedule_has_a_case() -> None:
    assert {*CASES, *HERE} == {*FAMILIES, "reference"}


@pytest.mark.parametrize("schedule", CASES)
def test_assembly_names_the_schedule_and_labels_the_loop_that_multiplies(schedule: str, tmp_path: Path) -> None:
    case = CASES[schedule]
    compile_region(case.contract(), schedule=schedule, observer=Dump(str(tmp_path)).stages("layer"), target=ALL)
    (path,) = tmp_path.glob("*_layer_assembly.s")
    check(path.read_text(), schedule, case.multiply)


@pytest.mark.parametrize("schedule", HERE)
def test_the_option_dump_ir_writes_it_for_a_linear_layer(schedule: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    block = (16, 1) if "block" in schedule else (1, 1)
    model, x = prune_(nn.Sequential(nn.Linear(COLUMNS, ROWS)), 0.3, block).eval(), torch.randn(4, COLUMNS)
    if bits := HERE[schedule]:
        model = gossamer.quantize(model, weights=f"int{bits}", group=16)  # type: ignore[arg-type]
    run = compile_and_run(model, x, regions=1, schedule=schedule, dump_ir=str(tmp_path))
    layer: Any = model.get_submodule("0")
    exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    torch.testing.assert_close(run.output.double(), exact, rtol=1e-4, atol=1e-5)
    (path,) = tmp_path.glob("*assembly.s")
    check(path.read_text(), schedule, r"(v?fmadd\w*|v?mul[ps]s|fmla|fmul)")
