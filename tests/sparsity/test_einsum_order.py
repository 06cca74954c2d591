"""Einsums of three and more operands: which pairs come first, and that results and gradients are those of dense tensors."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import gossamer
from gossamer import SparseTensor
from gossamer.backend.report.report import collect
from gossamer.dialects.errors import GossamerError
from gossamer.dialects.format import Format
from gossamer.sparsity.operations import einsum_order
from gossamer.sparsity.operations.einsum_order import Order, Sketch, cheaper_order
from gossamer.sparsity.tensor import einsum_sketches
from gossamer.sparsity.tensor.coordinate_list import CoordinateList


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def sparse(*shape: int, density: float = 0.05, dtype: torch.dtype = torch.float32, format: Format = Format.CSR) -> SparseTensor:
    return SparseTensor.from_dense(torch.randn(shape, dtype=dtype) * (torch.rand(shape) < density), format)


def sketches(inputs: str, sizes: dict[str, int], entries: dict[int, float]) -> list[Sketch]:
    """Of the operands of an expression; those with a number of entries are sparse."""
    found = []
    for at, letters in enumerate(inputs.split(",")):
        own = {letter: sizes[letter] for letter in letters}
        whole = float(torch.tensor([*own.values()]).prod())
        found.append(Sketch(own, entries.get(at, whole), at in entries))
    return found


def pairs(order: Order | None) -> list[str]:
    return [] if order is None else [step.letters for step in order.steps]


WIDE = {"i": 2000, "j": 2000, "k": 64, "l": 64, "r": 16}


@pytest.mark.parametrize(
    ("inputs", "result", "sizes", "entries", "expected"),
    [
        ("ij,jk,kl", "il", WIDE | {"l": 16}, {0: 4e4}, ["jl"]),  # X W first
        ("ij,jk,kl", "il", WIDE | {"k": 16}, {0: 4e4}, ["ik"]),  # A X first: W is wider
        ("ij,jk,kl", "il", {"i": 2000, "j": 2000, "k": 2000, "l": 64}, {0: 4e4, 1: 4e4}, ["jl"]),  # A (B X)
        ("ij,jk,k", "i", {"i": 2000, "j": 2000, "k": 2000}, {0: 4e4, 1: 4e4}, ["j"]),  # A (B x)
        ("ij,ik,jk", "ij", WIDE, {0: 4e4}, []),  # sampled at once
        ("ij,ik,kl,jl", "ij", WIDE, {0: 4e4}, ["il"]),  # X W first, then sampled
        ("ijk,jr,kr", "ir", {"i": 300, "j": 300, "k": 300, "r": 16}, {0: 1e4}, []),  # MTTKRP
    ],
)
def test_the_cheaper_order_of_products(
    inputs: str, result: str, sizes: dict[str, int], entries: dict[int, float], expected: list[str]
) -> None:
    """Expected as by hand: the fewest multiply-adds, counting entries of sparse operands alone."""
    kept = 0 if result == inputs.split(",")[0] else None
    order = cheaper_order(sketches(inputs, sizes, entries), result, sparse=kept is not None, kept=kept)
    assert pairs(order) == expected
    assert order is None or order.gain >= 1.5


def test_counts_of_entries_decide_where_densities_do_not() -> None:
    """A has its entries in a few columns, B in the same rows: A B costs as much as the square of these counts, and is dense."""
    n, few = 4000, 20
    crowded = torch.zeros(n, dtype=torch.float64)
    crowded[:few] = n * 10 / few
    even = torch.full((n,), 10.0, dtype=torch.float64)

    def chain(columns: Tensor) -> list[str]:
        a = Sketch({"i": n, "j": n}, n * 10.0, True, {"i": even, "j": columns})
        b = Sketch({"j": n, "k": n}, n * 10.0, True, {"j": columns, "k": even})
        c = Sketch({"k": n, "l": n}, n * 30.0, True, {"k": 3 * even, "l": 3 * even})
        return pairs(cheaper_order([a, b, c], "il", sparse=True))

    assert chain(crowded) == ["jl"] and chain(even) == ["ik"]


CASES = {
    "ij,jk,kl->il": ((60, 50), (50, 40), (40, 30)),
    "ij,jk,k->i": ((60, 50), (50, 40), (40,)),
    "i,ij,jk,k->i": ((60,), (60, 50), (50, 40), (40,)),
    "ij,jk,kl,lm->im": ((60, 50), (50, 40), (40, 30), (30, 20)),
    "ji,jk,lk->il": ((50, 60), (50, 40), (30, 40)),
    "ij,ik,kl,jl->ij": ((60, 50), (60, 40), (40, 30), (50, 30)),
    "bij,bjk,kl->bil": ((3, 20, 30), (3, 30, 40), (40, 10)),
    "ij,j,jk,k->ik": ((60, 50), (50,), (50, 40), (40,)),
    "ij,jk,kl->": ((60, 50), (50, 40), (40, 30)),
    "ab,cd,ef->abcdef": ((2, 3), (3, 2), (2, 2)),
}


@pytest.fixture
def pairs_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of these tests are small: calls take no time, and all at once a lot."""
    monkeypatch.setattr(einsum_order, "_CALL", 0.0)
    monkeypatch.setattr(einsum_order, "_GAIN", 1.0)
    monkeypatch.setattr(einsum_sketches, "_LONG", 0.0)


@pytest.mark.usefixtures("pairs_pay")
@pytest.mark.parametrize("places", [(0,), (1,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("expression", CASES)
def test_results_and_gradients_are_those_of_dense_tensors(expression: str, places: tuple[int, ...]) -> None:
    shapes = CASES[expression]
    operands: list[Tensor] = []
    for at, shape in enumerate(shapes):
        is_sparse = at in places and len(shape) > 1
        format = Format.CSR if len(shape) == 2 else Format.csf(len(shape))
        made = sparse(*shape, density=0.1, dtype=torch.float64, format=format) if is_sparse else torch.randn(shape).double()
        operands.append(made.requires_grad_())
    dense = [each.detach().to_dense().requires_grad_() for each in operands]
    got = gossamer.einsum(expression, *operands)
    expected = torch.einsum(expression, *dense)
    torch.testing.assert_close(got.to_dense() if isinstance(got, SparseTensor) else got, expected)
    weights = torch.randn_like(expected)
    stored = got.to_dense() if isinstance(got, SparseTensor) else got
    found = torch.autograd.grad((stored * weights).sum(), operands)
    wanted = torch.autograd.grad((expected * weights).sum(), dense)
    for mine, theirs, operand in zip(found, wanted, operands, strict=True):
        if isinstance(mine, SparseTensor):
            assert isinstance(operand, SparseTensor)
            pattern = operand.detach().with_values(torch.ones_like(operand.values())).to_dense()
            torch.testing.assert_close(mine.to_dense(), theirs * pattern)
        else:
            torch.testing.assert_close(mine, theirs)


@pytest.mark.usefixtures("pairs_pay")
def test_a_result_with_the_pattern_of_its_operand_keeps_stored_zeros() -> None:
    a, x, w, y = sparse(60, 50), torch.randn(60, 40), torch.zeros(40, 30), torch.randn(50, 30)
    got = gossamer.einsum("ij,ik,kl,jl->ij", a, x, w, y)
    assert isinstance(got, SparseTensor) and got.nnz == a.nnz and not got.values().any()


@pytest.mark.usefixtures("pairs_pay")
def test_sparse_results_of_sparse_operands_stay_sparse() -> None:
    a, b, c = (sparse(60, 60, density=0.02) for _ in range(3))
    got = gossamer.einsum("ij,jk,kl->il", a, b, c)
    assert isinstance(got, SparseTensor) and got.format == Format.CSR
    torch.testing.assert_close(got.to_dense(), a.to_dense() @ b.to_dense() @ c.to_dense())


@pytest.mark.usefixtures("pairs_pay")
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    dense = [torch.randint(0, 2, shape).to(dtype) for shape in ((20, 30), (30, 10), (10, 5))]
    got = gossamer.einsum("ij,jk,kl->il", SparseTensor.from_dense(dense[0]), *dense[1:])
    expected = torch.einsum("ij,jk,kl->il", *(each.double() for each in dense))
    torch.testing.assert_close(got.double(), expected if dtype != torch.bool else (expected > 0).double())


@pytest.mark.usefixtures("pairs_pay")
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_einsums_say_which_order_was_taken(dynamic: bool | None) -> None:
    a, x, w = sparse(300, 200), torch.randn(200, 40), torch.randn(40, 30)
    call = torch.compile(
        lambda a, x, w: gossamer.einsum("ij,jk,kl->il", a, x, w), backend="sparse", fullgraph=True, dynamic=dynamic,
        options={"dense": "eager", "strict": True},
    )  # fmt: skip
    with collect() as found:
        got = call(a, x, w)
    torch.testing.assert_close(got, a.to_dense() @ x @ w, rtol=1e-4, atol=1e-4)
    orders = [each for each in found.decisions if each.op == "product order"]
    assert [each.reason for each in orders][:1] == ["jk,kl->jl, then ij,jl->il"]
    assert orders[0].gain is not None and orders[0].gain > 1 and orders[0].name == "ij,jk,kl->il"


def test_sizes_that_do_not_fit_are_refused_as_a_whole() -> None:
    with pytest.raises(GossamerError, match=r"einsum 'ij,jk,kl->il': 'k' is 40 and 41"):
        gossamer.einsum("ij,jk,kl->il", sparse(60, 50), torch.randn(50, 40), torch.randn(41, 30))


@pytest.mark.usefixtures("pairs_pay")
def test_entries_of_an_operand_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values do not matter, other coordinates do."""
    counted = list[tuple[int, ...]]()
    coordinates = CoordinateList.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[CoordinateList], tensor: SparseTensor) -> CoordinateList:
        counted.append(tuple(tensor.shape))
        return coordinates(cls, tensor)

    monkeypatch.setattr(CoordinateList, "of", classmethod(of))
    a, b, other, c = sparse(60, 50), sparse(50, 40), sparse(50, 40), torch.randn(40, 30)
    for left, right in ((a, b), (a * 2, b), (a, other)):
        y = gossamer.einsum("ij,jk,kl->il", left, right, c)
        torch.testing.assert_close(y, left.to_dense() @ right.to_dense() @ c)
    assert counted == [(60, 50), (50, 40), (50, 40)]


def test_products_without_elements() -> None:
    a, b, c = sparse(60, 50), sparse(50, 40), torch.randn(40, 7)
    for first, rows in ((a.to_dense()[:0], 0), (a.to_dense()[:, :0], 60)):
        second = b.to_dense()[: first.shape[1]]
        given = SparseTensor.from_dense(first), SparseTensor.from_dense(second), c
        assert torch.equal(gossamer.einsum("ij,jk,kl->il", *given), torch.zeros(rows, 7))
