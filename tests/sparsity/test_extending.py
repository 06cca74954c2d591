"""What users add: docs/extending.md runs as it stands, and what is refused says why."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gossamer
from gossamer import Format, FormatError, GossamerError, OptionError, SparseTensor
from gossamer.dialects import format as formats
from gossamer.sparsity import sparsifiers
from gossamer.sparsity.arrays import stored_entries
from gossamer.sparsity.tensor import densify
from tests.sparsity.made import matrix, sparse

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten."""
    monkeypatch.setattr(SparseTensor, "functions", dict(SparseTensor.functions))
    monkeypatch.setattr(formats, "_REGISTERED", {})
    monkeypatch.setattr(stored_entries, "PACKS", {})
    monkeypatch.setattr(sparsifiers, "_SPARSIFIERS", dict(sparsifiers._SPARSIFIERS))
    monkeypatch.setattr(densify, "_told", set())
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def test_the_document_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.backend.compile_module.has_cpp_compiler", lambda: False)  # which takes its time
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "extending.md", "exec"), names)
    assert str(names["Tiles"]) and "ELL" in repr(SparseTensor.from_dense(torch.eye(3), names["ELL"]))  # type: ignore[arg-type]


def test_a_packed_format_is_differentiable_and_gives_its_zeros_back() -> None:
    def diagonal(format: Format, shape: tuple[int, ...], at: list[torch.Tensor], values: torch.Tensor) -> object:
        every = torch.arange(shape[0])
        missing = every[~torch.isin(every, at[0][at[0] == at[1]])]
        return [torch.cat([crd, missing]) for crd in at], torch.cat([values, values.new_zeros(missing.numel())])

    format = gossamer.register_format("Diagonal", "(i, j) -> (i : dense, j : loose_compressed)", pack=diagonal)  # type: ignore[arg-type]
    dense = matrix(5, 5).requires_grad_()
    a = SparseTensor.from_dense(dense, format)
    x = torch.randn(5, 3)
    torch.testing.assert_close(a @ x, dense @ x)
    (a @ x).sum().backward()
    torch.testing.assert_close(dense.grad, (dense != 0) * x.sum(1))
    assert a.to_format(Format.CSR).nnz == int((dense != 0).sum()) < a.nnz


def test_names_and_levels_are_taken_once() -> None:
    gossamer.register_format("Mine", "(i, j) -> (i : dense, j : loose_compressed)")
    with pytest.raises(FormatError, match="is called CSR already, so it cannot become Mine"):
        gossamer.register_format("Mine", Format.CSR)
    with pytest.raises(FormatError, match="'Mine' cannot name a format, or names another one already"):
        gossamer.register_format("Mine", "(i, j) -> (j : dense, i : loose_compressed)")
    with pytest.raises(OptionError, match="there is a sparsifier called 'nm' already"):
        gossamer.register_sparsifier("nm")(sparsifiers.magnitude)
    with pytest.raises(OptionError, match=r"sparsifier 'best' is not known.*: there are magnitude, nm, block"):
        gossamer.sparsify(torch.eye(3), "best")
    with pytest.raises(OptionError, match=r"unexpected .* 'sparsity': sparsifier 'magnitude' takes density, format"):
        gossamer.sparsify(torch.eye(3), "magnitude", density=0.1, sparsity=0.9)
    with pytest.raises(OptionError, match="missing a required argument: 'density': sparsifier 'magnitude' takes"):
        gossamer.sparsify(torch.nn.Linear(3, 3), "magnitude")


@pytest.mark.parametrize(
    ("how", "options", "density"),
    [
        ("magnitude", {"density": 0.25}, 0.25),
        ("nm", {"n": 1, "m": 4}, 0.25),
        ("block", {"rows": 2, "columns": 3, "density": 0.5}, 0.5),
    ],
)
def test_sparsifiers_keep_the_largest(how: str, options: dict[str, float], density: float) -> None:
    dense = torch.randn(8, 12)
    kept = gossamer.sparsify(dense, how, **options)
    plain = kept.to_dense()
    stored = plain != 0
    torch.testing.assert_close(plain, dense * stored)
    assert stored.float().mean() == density
    if how == "magnitude":
        assert plain[stored].abs().min() >= dense[~stored].abs().max()
    model = gossamer.sparsify(torch.nn.Sequential(torch.nn.Linear(12, 8)), how, **options)
    assert (model[0].weight != 0).float().mean() == density


def test_what_has_no_sparse_form_is_said_once_or_raised() -> None:
    a = sparse(matrix(4, 6))
    with pytest.warns(
        UserWarning, match=r"SparseTensor has no sparse cos, so it is computed on all elements, zeros too"
    ) as told:
        torch.cos(a), a.cos()
    assert len(told) == 1
    with gossamer.strict(), pytest.raises(GossamerError, match=r"no sparse sinc, so .* Write to_dense\(\) if you want that"):
        torch.sinc(a)
    with gossamer.strict(), gossamer.strict(False), pytest.warns(UserWarning, match="no sparse sinc"):
        torch.sinc(a)

    @gossamer.strict()
    def product(a: torch.Tensor) -> torch.Tensor:
        return torch.relu(a @ a.t()).to_dense() + 1

    torch.testing.assert_close(product(a), a.to_dense() @ a.to_dense().t() + 1)


def test_it_is_said_when_compiled_too() -> None:
    a = sparse(matrix(4, 6))
    with pytest.warns(UserWarning, match="SparseTensor has no sparse cos"):
        out = torch.compile(lambda a: torch.cos(a), backend="aot_eager", fullgraph=True)(a)
    torch.testing.assert_close(out, torch.cos(a.to_dense()))
    with gossamer.strict(), pytest.raises(Exception, match="SparseTensor has no sparse sinc"):
        torch.compile(lambda a: torch.sinc(a), backend="aot_eager", fullgraph=True)(a)


@pytest.mark.filterwarnings("ignore:SparseTensor has no sparse")
def test_functions_under_other_names_than_torch_gives_them() -> None:
    """Methods that are no functions of torch, functions whose builtins are called otherwise, operators, private ones."""
    dense = matrix(4, 6)
    for function in (
        lambda a: a.sum_to_size(1, 6),
        torch.nn.functional.logsigmoid,
        lambda a: torch.ops.aten.slice(a, 1, 0, 6, 2),
        lambda a: torch.masked_select(a, torch.tensor([[[True]], [[False]], [[True]]])),
    ):
        found = function(sparse(dense))
        torch.testing.assert_close(found.to_dense(), function(dense))


def test_what_only_writes_is_refused() -> None:
    with pytest.raises(GossamerError, match=r"SparseTensor has no bernoulli_: use to_dense\(\)"):
        sparse(matrix(4, 6)).bernoulli_(0.5)
