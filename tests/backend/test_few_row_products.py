"""Dense layers of a model that Gossamer runs a part of, with a few tokens: the kernel for experts reads their weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.backend.measuring import few_rows_times
from gossamer.backend.operations import few_row_products
from gossamer.backend.run import few_rows
from tests.backend.harness import Run, assert_same, compile_and_run

COLUMNS, OUTPUTS = 272, 280


class Writer(nn.Module):
    """A pruned layer, and dense ones with and without a bias."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pruned = nn.Linear(COLUMNS, COLUMNS)
        self.pruned.weight.data.mul_(torch.rand(COLUMNS, COLUMNS) < 0.02)
        self.middle, self.last = nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, OUTPUTS, bias=False)
        self.to(dtype).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.pruned(x)).relu())


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether the kernel is measured to be faster: it is."""

    def say(whether: bool) -> None:
        monkeypatch.setattr(few_row_products, "is_faster", lambda *shape: whether)

    monkeypatch.setattr(few_row_products, "_BYTES", 1 << 16)
    say(True)
    return say


def compiled(model: Writer, x: Tensor, **options: Any) -> Run:
    """The pruned layer is sparse, dense ones stay dense."""
    return compile_and_run(model, x, min_gain=0.1, **options)


def products(run: Run) -> list[str]:
    """The dense weights that the kernel reads."""
    return [decision.name for decision in run.decisions if decision.schedule == "rows"]


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_rows_give_what_torch_gives(rows: int, dtype: torch.dtype) -> None:
    model, x = Writer(dtype), torch.randn(rows, COLUMNS, dtype=dtype)
    run = compiled(model, x)
    assert products(run) == ["middle.weight", "last.weight"]
    assert_same(run.output, model(x))


def test_more_rows_stay_with_torch() -> None:
    assert products(compiled(Writer(), torch.randn(9, COLUMNS))) == []


def test_what_torch_multiplies_faster_stays_with_it(faster: Callable[[bool], None]) -> None:
    faster(False)
    assert products(compiled(Writer(), torch.randn(1, COLUMNS))) == []


def test_small_weights_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_row_products, "_BYTES", 1 << 20)
    assert products(compiled(Writer(), torch.randn(1, COLUMNS))) == []


def test_models_that_are_dense_throughout_stay_with_torch() -> None:
    model = Writer()
    model.pruned = nn.Identity()
    assert products(compiled(model, torch.randn(1, COLUMNS), regions=0)) == []


def test_a_changed_weight_is_read_as_it_is() -> None:
    model, x = Writer(), torch.randn(1, COLUMNS)
    run = compiled(model, x)
    with torch.no_grad():
        model.last.weight.copy_(torch.randn(OUTPUTS, COLUMNS))
        assert_same(run.function(x), model(x))
        model.last.weight = nn.Parameter(torch.randn(OUTPUTS, COLUMNS))
        assert_same(run.function(x), model(x))


def test_eval_models_have_gradients() -> None:
    model, x = Writer(), torch.randn(2, COLUMNS)
    with torch.enable_grad():
        compiled(model, x)
        y = torch.compile(model, backend="sparse")(x)
        torch.testing.assert_close(
            torch.autograd.grad(y.sum(), model.last.weight), torch.autograd.grad(model(x).sum(), model.last.weight)
        )


def test_vectors_rows_of_a_larger_matrix_and_nan() -> None:
    model = Writer()
    run = compiled(model, torch.randn(1, COLUMNS))
    x = torch.randn(4, COLUMNS)[2:3]
    assert_same(run.function(x), model(x))
    x[0, 3] = torch.nan
    assert run.function(x).isnan().any() == model(x).isnan().any()


def test_the_ratio_is_measured_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert few_rows_times.is_faster(1, 64, 64, torch.float32) is False  # where nothing may be measured
    monkeypatch.setenv("GOSSAMER_CALIBRATE", "1")
    monkeypatch.setattr(few_rows_times, "kept", lambda what, key, measure, best: measure())
    monkeypatch.setattr(few_rows_times, "_BYTES", 1 << 20)
    few_rows_times._ratio.cache_clear()
    assert few_rows_times.is_faster(1, 64, 64, torch.float32) in (True, False)
    few_rows_times._ratio.cache_clear()


def test_the_operation_reads_the_last_elements_of_a_weight() -> None:
    from gossamer.sparsity.experts.kernels import one_expert

    for rows, columns, outputs in ((1, 1, 1), (1, 17, 5), (8, 33, 31), (3, 64, 129)):
        x, weight = torch.randn(rows, columns), torch.randn(outputs, columns)
        torch.testing.assert_close(few_rows.FewRows(one_expert(torch.float32, columns), rows)([x, weight]), x @ weight.t())
