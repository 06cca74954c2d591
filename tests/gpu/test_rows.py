"""Products of a CSR matrix of any shape with a dense one, run in the emulator and assembled by NVIDIA's assembler."""

import re

import pytest
import torch
from torch import Tensor

from tests.contracts import TYPES, assert_near
from tests.gpu.assembler import assembled
from tests.gpu.emulator import Fault
from tests.gpu.kernels import no_generic_access, planted
from tests.gpu.open_products import compiled, emulate
from tests.open_contracts import OpenProduct


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


def matrix(rows: int, columns: int, density: float, element: str = "f32") -> Tensor:
    """Whole eighths, so that all sums are exact in f32."""
    return (eighths(rows, columns) * (torch.rand(rows, columns) < density)).to(TYPES[element])


def eighths(*size: int) -> Tensor:
    return (torch.randn(size) * 8).round() / 8


def product(a: Tensor, x: Tensor, variant: str, element: str = "f32", seed: int | None = None) -> Tensor:
    return emulate(compiled("rows", element), variant, a, [x], (a.shape[0], x.shape[1]), seed=seed)


@pytest.mark.parametrize(
    ("columns", "variant"), [(1, "r8"), (3, "r32"), (16, "r8"), (33, "r32"), (66, "r8"), (136, "r32"), (260, "r8")]
)
def test_any_number_of_columns(columns: int, variant: str) -> None:
    """With few columns lanes are entries, with more they are columns, in vectors where rows of x are aligned."""
    a, x = matrix(35, 50, 0.3), eighths(50, columns)
    a[3], a[34] = 0, 0
    assert_near(product(a, x, variant), a.double() @ x.double())


@pytest.mark.parametrize("element", ["f64", "bf16", "f16"])
def test_every_type_gives_the_dense_product(element: str) -> None:
    for columns in (3, 136):
        a, x = matrix(9, 40, 0.3, element), eighths(40, columns).to(TYPES[element])
        assert_near(product(a, x, "r8", element), a.double() @ x.double())


@pytest.mark.parametrize(("columns", "seed"), [(1, 0), (40, None), (40, 1)])
def test_rows_much_longer_than_others(columns: int, seed: int | None) -> None:
    """Rows of more than 512 entries are shared out to the warps of a block, also where some get no part."""
    a, x = matrix(8, 700, 0.01), eighths(700, columns)
    a[2, :600], a[4], a[7, 100:613] = 1, 2, 0.5
    assert_near(product(a, x, "r32", seed=seed), a.double() @ x.double())


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 3)])
def test_a_matrix_without_entries(rows: int, columns: int) -> None:
    assert product(torch.zeros(rows, 5), eighths(5, columns), "r8").tolist() == [[0.0] * columns] * rows


def test_infinity_and_nan_reach_the_results_that_depend_on_them_only() -> None:
    a = matrix(9, 40, 0.9)
    for columns in (2, 20):
        x = eighths(40, columns)
        x[0, 0], x[39, 1] = torch.inf, torch.nan
        a[:, 0], a[:, 39] = 0, 0
        a[3, 0], a[5, 39] = 1, 1
        result = product(a, x, "r32")
        assert torch.isinf(result).nonzero().tolist() == [[3, 0]] and torch.isnan(result).nonzero().tolist() == [[5, 1]]


FAULTS = {
    "no barrier before parts are read": (r"bar\.sync\s+0;", "", 2),
    "no barrier after parts are read": (r"bar\.sync\s+0;", "", 3),
    "no barrier before entries are read": (r"bar\.warp\.sync\s+-1;", "", 1),
    "no barrier after entries are read": (r"bar\.warp\.sync\s+-1;", "", 2),
    "shifted": (r"(ld\.global\.nc\.v4\.b32[^\[]*\[%rd\d+)\]", r"\1+16]", 0),
}


@pytest.mark.parametrize(("pattern", "replacement", "number"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_caught(pattern: str, replacement: str, number: int) -> None:
    made = compiled("rows", "f32")
    a, x = torch.zeros(4, 700), eighths(700, 136)
    a[0], a[2], a[3, :70] = 1, 2, 3
    broken = planted(made.ptx, pattern, replacement, number)
    with pytest.raises((Fault, AssertionError)):
        assert_near(emulate(made, "r8", a, [x], (4, 136), seed=0, ptx=broken), a.double() @ x.double())


@pytest.mark.parametrize(("element", "capability"), [("f32", 80), ("f32", 90), ("f32", 100), ("f64", 90), ("bf16", 90)])
def test_the_assembler_takes_the_kernel(element: str, capability: int) -> None:
    made = compiled("rows", element, capability)
    usage = assembled(made.ptx, capability)
    assert set(usage) == set(made.kernels.launches)
    assert all(kernel.registers <= 80 and kernel.spilled <= 160 for kernel in usage.values())
    assert all(launch.shared <= 48 * 1024 for launch in made.kernels.launches.values())
    assert no_generic_access(made.ptx)


def test_memory_is_read_and_written_16_bytes_at_once() -> None:
    ptx = compiled("rows", "f32").ptx
    widest = ptx[ptx.index("region_r32(") :]
    assert len(re.findall(r"ld\.global\.nc\.v4\.b32", widest)) >= 4 and "st.global.v4.b32" in widest
    assert "ld.shared.v2.b64" in widest, "an entry is read at once"


@pytest.mark.parametrize(
    ("element", "steps"),
    [
        ("f32", ("token_scale", "bias", "residual", "relu")),
        ("f32", ("gelu",)),
        ("bf16", ("bias", "scale", "relu")),
        ("f64", ("relu_backward", "bias")),
    ],
)
def test_an_epilogue_reaches_rows_of_every_length(element: str, steps: tuple[str, ...]) -> None:
    """On rows of a warp, on those shared out to a block, on empty ones; in vectors of every width, and a column at a time."""
    described, made = OpenProduct(element, steps), compiled("rows", element, steps=steps)
    for columns in (3, 33, 136) if element == "f32" else (3, 136):
        a, x = matrix(9, 600, 0.01, element), eighths(600, columns).to(TYPES[element])
        a[2, :560], a[4] = 1, 0
        extras = described.extras(9, columns)
        result = emulate(made, "r8", a, [x, *extras], (9, columns))
        assert_near(result, described.reference(a.double() @ x.double(), extras))


def test_epilogue_of_a_vector() -> None:
    described, a, x = OpenProduct("f32", ("residual", "relu"), vector=True), matrix(9, 600, 0.1), eighths(600)
    a[2], a[4] = 0.5, 0
    extras = described.extras(9)
    made = compiled("rows", "f32", steps=described.steps, vector=True)
    assert_near(emulate(made, "r32", a, [x, *extras], (9,)), described.reference(a.double() @ x.double(), extras))


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_an_epilogue_assembles(capability: int) -> None:
    made = compiled("rows", "f32", capability, ("token_scale", "bias", "residual", "gelu"))
    usage = assembled(made.ptx, capability)
    assert all(kernel.registers <= 96 and kernel.spilled <= 160 for kernel in usage.values()), usage
    assert no_generic_access(made.ptx)
