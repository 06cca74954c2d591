"""What a chain brings to a product, by family: what the decision between a chain and its layers rests on."""

import pytest

from gossamer.passes.chains.products import gain_in_chain, runs_in_chains
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.families import FAMILIES

FEATURES = frozenset({"bf16dots", "amx"})


def blocks(density: float, block: tuple[int, int] = (32, 32), columns: int = 768) -> Matrix:
    return Matrix(3072, columns, 1, "bf16", 512, density=density, block=block, features=FEATURES)


@pytest.mark.parametrize(("tokens", "ahead"), [(16, False), (32, True), (512, True)])
def test_dot_products_need_more_than_a_vector_of_tokens(tokens: int, ahead: bool) -> None:
    assert (gain_in_chain("bf16dot", blocks(0.1), tokens) > 1) is ahead


def test_tiles_gain_what_transposes_cost_the_more_the_sparser_the_weight() -> None:
    gains = [gain_in_chain("amxcolumns", blocks(density), 128) for density in (0.5, 0.2, 0.1, 0.05)]
    assert 1 < gains[0] < gains[1] < gains[2] < gains[3] < 2.5


@pytest.mark.parametrize(
    ("schedule", "block", "columns", "runs"),
    [
        ("amxcolumns", (32, 32), 768, True),
        ("amxcolumns", (32, 32), 784, False),  # the last block would read beyond x
        ("amxcolumns", (16, 2), 102, True),
        ("amxcolumns", (16, 2), 101, False),
        ("amxcolumns", (16, 1), 101, True),
        ("bf16dot", (32, 32), 768, True),
        ("amx", (32, 32), 768, False),  # multiplies x as it lies in torch's memory
    ],
)
def test_no_product_of_a_chain_reads_beyond_the_last_column(
    schedule: str, block: tuple[int, int], columns: int, runs: bool
) -> None:
    assert runs_in_chains(schedule, blocks(0.1, block, columns)) is runs


@pytest.mark.parametrize("schedule", [name for name, family in FAMILIES.items() if family.chain is not None])
def test_gains_are_numbers_for_any_tokens(schedule: str) -> None:
    element = "bf16" if FAMILIES[schedule].floats else "i8"
    features = FEATURES | {"avx512vbmi", "avx512vbmi2", "amxint8", "bytedots"}
    matrix = Matrix(64, 128, 1, element, 512, 0.3, block=(32, 64), features=features)
    gains = [gain_in_chain(schedule, matrix, tokens) for tokens in (0, 1, 1000)]
    assert all(0 < gain < 100 for gain in gains), gains
