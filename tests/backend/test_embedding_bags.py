"""Embedding tables in compiled models: bags and sums are ours, numbers are those of eager torch in float64."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer
from gossamer.backend.measuring import bag_times
from gossamer.dialects.errors import IndexRangeError
from gossamer.sparsity.bags.steps import unwatched, watch_optimizers
from tests.backend.harness import assert_same, compile_and_run
from tests.fuzz import embeddings as fuzz


class Recommender(nn.Module):
    """A bag by offsets, one by lines, a masked sum and a mean over embeddings."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.genres = nn.EmbeddingBag(300, 16, mode="sum", padding_idx=3, sparse=sparse)
        self.users = nn.EmbeddingBag(100, 16, mode="mean", sparse=sparse)
        self.words = nn.Embedding(50, 16, padding_idx=0, sparse=sparse)
        self.out = nn.Linear(64, 3)

    def forward(self, genres: Tensor, offsets: Tensor, users: Tensor, words: Tensor) -> Tensor:
        mask = (words != 0).to(self.out.weight.dtype).unsqueeze(-1)
        parts = [
            self.genres(genres, offsets), self.users(users), (self.words(words) * mask).sum(1), self.words(words).mean(1),
        ]  # fmt: skip
        result: Tensor = self.out(torch.cat(parts, 1).tanh())
        return result


def batch(size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 5, (size,), generator=random)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)[:-1]])
    genres = torch.randint(0, 300, (int(counts.sum()),), generator=random)
    users, words = (torch.randint(0, rows, (size, 4), generator=random) for rows in (100, 50))
    return genres, offsets, users, words


def test_tables_that_come_one_after_the_other_are_one_call() -> None:
    model = Recommender().eval()
    run = compile_and_run(model, *batch(9), regions=5)
    means = [decision for decision in run.decisions if decision.reason == "one of 2 in a call"]
    assert [decision.name for decision in means] == ["users.weight", "words.weight"]
    assert_same(run.output, model.double()(*batch(9)).float())


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_training_is_that_of_float64(sparse: bool, dynamic: bool | None) -> None:
    torch.manual_seed(0)
    model = Recommender(sparse)
    twin = copy.deepcopy(model).double()
    compiled = torch.compile(
        model, backend="sparse", dynamic=dynamic, fullgraph=True, options={"dense": "eager", "strict": True, "min_gain": 0}
    )
    optimizers = [torch.optim.Adagrad(each.parameters(), lr=0.1, eps=0.1) for each in (model, twin)]
    for step in range(3):
        given = batch(5 + step, step)
        for call, optimizer in ((compiled, optimizers[0]), (twin, optimizers[1])):
            optimizer.zero_grad()
            call(*given).square().sum().backward()
            if optimizer is optimizers[0]:
                layout = torch.sparse_coo if sparse else torch.strided
                assert all(each.weight.grad.layout is layout for each in (model.genres, model.users, model.words))
            optimizer.step()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert_same(ours.detach(), theirs.detach().float())


def test_sparse_gradients_compile_with_inductor() -> None:
    model, given = Recommender(True), batch(6)
    twin = copy.deepcopy(model)
    torch.compile(model, backend="sparse", fullgraph=True, options={"strict": True})(*given).sum().backward()
    twin(*given).sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        wanted = theirs.grad.to_dense() if theirs.grad.is_sparse else theirs.grad
        assert_same(ours.grad.to_dense() if ours.grad.is_sparse else ours.grad, wanted)


def test_a_sparse_gradient_has_each_row_once_ascending() -> None:
    model, given = Recommender(True), batch(30)
    compiled = torch.compile(model, backend="sparse", options={"dense": "eager", "strict": True})
    compiled(*given).sum().backward()
    rows = model.genres.weight.grad._indices()[0]
    assert rows.tolist() == sorted(set(given[0].tolist()) - {3})


def test_the_padding_row_neither_leaks_nor_learns() -> None:
    model = nn.EmbeddingBag(10, 8, mode="mean", padding_idx=2, sparse=True)
    with torch.no_grad():
        model.weight[2] = torch.nan
    compiled = torch.compile(model, backend="sparse", options={"dense": "eager", "strict": True})
    y = compiled(torch.tensor([[1, 2, 2], [2, 2, 2]]))
    y.sum().backward()
    assert torch.equal(y[0], model.weight[1]) and not y[1].any()
    assert model.weight.grad._indices().tolist() == [[1]]


def test_a_maximum_learns_in_the_rows_that_it_is_from() -> None:
    model = nn.EmbeddingBag(40, 8, mode="max")
    indices, offsets = torch.randint(0, 40, (30,)), torch.tensor([0, 0, 7, 20])
    run = compile_and_run(model, indices, offsets, grad=True, regions=1)
    run.output.square().sum().backward()
    twin = copy.deepcopy(model)
    twin.weight.grad = None
    twin(indices, offsets).square().sum().backward()
    assert_same(run.output, twin(indices, offsets))
    assert_same(model.weight.grad, twin.weight.grad)


def test_weights_of_entries_learn() -> None:
    table = nn.Parameter(torch.randn(40, 8, dtype=torch.float64))
    weights = torch.randn(30, dtype=torch.float64, requires_grad=True)
    indices, ends = torch.randint(0, 40, (30,)), torch.tensor([0, 0, 7, 20, 30])

    def bags(table: Tensor, weights: Tensor) -> Tensor:
        return F.embedding_bag(indices, table, ends, mode="sum", per_sample_weights=weights, include_last_offset=True)

    run = compile_and_run(bags, table, weights, grad=True, regions=1)
    ours = torch.autograd.grad(run.output.sin().sum(), (table, weights))
    theirs = torch.autograd.grad(bags(table, weights).sin().sum(), (table, weights))
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)


def test_a_frozen_maximum_is_no_part_of_the_call_of_one_that_learns() -> None:
    model = nn.ModuleList(nn.EmbeddingBag(40, 8, mode="max") for _ in range(2))
    model[1].requires_grad_(False)
    indices = torch.randint(0, 40, (5, 3))
    both = lambda indices: model[0](indices) * model[1](indices)
    run = compile_and_run(both, indices, grad=True, regions=2)
    assert not any("one of 2" in d.reason for d in run.decisions)
    found, wanted = (torch.autograd.grad(y.square().sum(), model[0].weight)[0] for y in (run.output, both(indices)))
    assert_same(found, wanted)


class Mixed(nn.Module):
    """Indices of int32 beside offsets of int64, as torch.tensor and cumsum make them, and weights that learn."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(50, 16, sparse=sparse), nn.EmbeddingBag(60, 16, mode="sum", sparse=sparse)
        self.weights = nn.Parameter(torch.rand(60))

    def forward(self, ids: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        result: Tensor = self.words(ids) + self.bags(rows, offsets, per_sample_weights=self.weights[rows])
        return result + F.embedding_bag(rows, self.bags.weight, offsets, mode="sum", sparse=self.bags.sparse)


@pytest.mark.parametrize("sparse", [False, True])
def test_indices_and_offsets_may_have_different_types(sparse: bool) -> None:
    torch.manual_seed(0)
    model, offsets = Mixed(sparse), torch.tensor([0, 3, 3, 8, 12, 19])
    ids, rows = torch.randint(0, 50, (6,), dtype=torch.int32), torch.randint(0, 60, (20,), dtype=torch.int32)
    run = compile_and_run(model, ids, rows, offsets, grad=True)
    expected = model(ids.long(), rows.long(), offsets)
    assert_same(run.output, expected)
    leaves = list(model.parameters())
    for found, wanted in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (run.output, expected)), strict=True):
        assert_same(found.to_dense(), wanted.to_dense())


@pytest.mark.parametrize("index", [10, -1])
def test_an_index_out_of_range_is_an_error_that_names_it(index: int) -> None:
    model = nn.EmbeddingBag(10, 8, mode="sum")
    run = compile_and_run(model, torch.tensor([[1, 2]]))
    with pytest.raises(IndexRangeError, match=f"index {index} at place 1 is out of range .* has 10 rows"):
        run.function(torch.tensor([[1, index]]))


def test_tables_that_change_are_read_as_they_are() -> None:
    model = nn.EmbeddingBag(10, 8, mode="sum").requires_grad_(False)
    given = torch.tensor([[1, 2]])
    run = compile_and_run(model, given)
    model.weight.mul_(2)
    assert_same(run.function(given), model.weight[1:3].sum(0, keepdim=True))
    model.weight = nn.Parameter(torch.ones(10, 8), requires_grad=False)
    assert_same(run.function(given), torch.full((1, 8), 2.0))
    model.load_state_dict({"weight": torch.full((10, 8), 3.0)})
    assert_same(run.function(given), torch.full((1, 8), 6.0))


def test_one_short_bag_stays_with_torch_in_training() -> None:
    bag = nn.EmbeddingBag(10, 8, mode="sum")
    run = compile_and_run(bag, torch.tensor([[1, 2]]), regions=0, min_gain=1.1, grad=True)
    assert "a call takes longer" in run.decisions[0].reason


def test_tables_of_floats_stay_with_torch_in_inference() -> None:
    run = compile_and_run(nn.EmbeddingBag(1000, 64, mode="sum"), torch.randint(1000, (64, 20)), regions=0, min_gain=1.1)
    assert "memory bounds torch's own kernel" in run.decisions[0].reason


@pytest.mark.parametrize("ratio", [0.6, 0.99, 1.4])
def test_tables_of_floats_go_the_way_that_was_measured_to_be_faster(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CALIBRATE", "1")
    monkeypatch.setattr(bag_times.BagsOfTables, "ratio", lambda self: ratio)
    model, faster = Recommender().eval(), ratio < 0.9
    run = compile_and_run(model, *batch(9), regions=2 if faster else 0, min_gain=1.1)
    together = [d for d in run.decisions if d.measured]
    assert [d.name for d in together] == ["users.weight", "words.weight"]
    assert all(d.gain == pytest.approx(1 / ratio) for d in together)
    assert faster or all("torch's own kernel was measured to be as fast" in d.reason for d in together)
    assert sum("a call takes longer" in d.reason for d in run.decisions) == 2
    assert_same(run.output, model.double()(*batch(9)).float())


@pytest.mark.parametrize(("kind", "weighted"), [("sum", True), ("sum", False), ("mean", False), ("max", False)])
def test_both_ways_to_bags_give_the_same(kind: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [torch.randn(50, 16), torch.randn(9, 16)]
    case = bag_times.BagsOfTables(tables, [3, 4], [7, 12], kind, torch.int32, weighted)
    lists = case._drawn(torch.Generator().manual_seed(1))
    torch.testing.assert_close(case._by_us(lists), case._by_torch(lists))
    monkeypatch.setattr(bag_times, "kept", lambda what, key, measure, best: measure())
    assert 0 < case.ratio() < 1e3


@pytest.mark.parametrize("name", ["Adagrad", "SparseAdam", "SGD"])
def test_torch_steps_are_the_same_and_touch_no_other_row(name: str) -> None:
    results = list[tuple[Tensor, Any]]()
    for watched in (True, False):
        torch.manual_seed(0)
        table = nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
        compiled = torch.compile(table, backend="sparse", options={"dense": "eager", "strict": True})
        optimizer = getattr(torch.optim, name)(table.parameters(), lr=0.1)
        before = table.weight.detach().clone()
        for step in range(3):
            compiled(torch.tensor([[1, 2], [2, 3 + step]])).square().sum().backward()
            if watched:
                optimizer.step()
            else:
                with unwatched():
                    optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(table.weight[6:], before[6:])
        results.append((table.weight.detach(), optimizer.state_dict()["state"].get(0, {})))
    (ours, state), (theirs, their_state) = results
    assert_same(ours, theirs)
    assert state.keys() == their_state.keys()
    for key, value in state.items():
        assert_same(torch.as_tensor(value, dtype=torch.float32), torch.as_tensor(their_state[key], dtype=torch.float32))


def test_hooks_of_optimizers_see_and_change_sparse_gradients() -> None:
    def trained(compiled: bool) -> tuple[Tensor, list[bool]]:
        torch.manual_seed(0)
        table, seen = nn.EmbeddingBag(50, 8, mode="sum", sparse=True), list[bool]()
        call = torch.compile(table, backend="sparse", options={"dense": "eager", "strict": True}) if compiled else table
        optimizer = torch.optim.SGD(table.parameters(), lr=0.5)

        def shrink(optimizer: torch.optim.Optimizer, *_: object) -> None:
            table.weight.grad = table.weight.grad * 0.1  # type: ignore[operator]

        hook = optimizer.register_step_pre_hook(shrink)
        optimizer.register_step_post_hook(lambda *_: seen.append(table.weight.grad is not None))
        for step in range(3):
            call(torch.tensor([[1, 2], [2, 3 + step]])).square().sum().backward()
            if step == 2:
                hook.remove()
            optimizer.step()
            optimizer.zero_grad()
        return table.weight.detach(), seen

    with unwatched():
        expected, saw = trained(False)
    found, seen = trained(True)
    assert_same(found, expected)
    assert seen == saw == [True] * 3


def test_a_step_that_raises_loses_no_gradient_of_ours_and_brings_none_back_later() -> None:
    watch_optimizers()
    table, dense = nn.EmbeddingBag(50, 8, mode="sum", sparse=True), nn.Parameter(torch.randn(3))
    optimizer = torch.optim.SparseAdam([table.weight, dense])
    (table(torch.tensor([[1, 2]])).sum() + dense.sum()).backward()
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert table.weight.grad is None
    beyond = torch.sparse_coo_tensor([[50]], torch.ones(1, 8), (50, 8), check_invariants=False, is_coalesced=True)
    table.weight.grad = beyond
    with pytest.raises(IndexRangeError, match="rows that its parameter lacks"):
        optimizer.step()
    assert table.weight.grad is beyond


def test_row_wise_adagrad_keeps_a_number_for_each_row() -> None:
    weight = nn.Parameter(torch.randn(6, 8))
    before = weight.detach().double()
    optimizer = gossamer.RowWiseAdagrad([weight], lr=0.1)
    gradient = torch.randn(2, 8)
    weight.grad = torch.sparse_coo_tensor([[4, 1]], gradient, (6, 8), check_invariants=True)
    optimizer.step()
    total = gradient.double().square().mean(1, keepdim=True)
    before[[4, 1]] -= 0.1 * gradient.double() / (total.sqrt() + 1e-10)
    assert optimizer.state[weight]["sum"].shape == (6,)
    assert_same(weight.detach(), before.float())


@pytest.mark.parametrize("seed", range(8))
def test_random_models_are_those_of_float64(seed: int) -> None:
    assert fuzz.problem_of(seed, direct=0.75) is None


@pytest.mark.parametrize("sparse", [False, True])
def test_under_autocast_tables_give_what_eager_code_gives_there(sparse: bool) -> None:
    torch.manual_seed(0)
    model = Recommender(sparse)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(*batch(9))
        run = compile_and_run(model, *batch(9), grad=True)
    assert sum(d.schedule == "sum-bags" for d in run.regions) == 4
    assert run.output.dtype == expected.dtype == torch.bfloat16
    assert_same(run.output, expected)
    wanted = torch.autograd.grad(expected.float().sum(), list(model.parameters()))
    for own, other in zip(torch.autograd.grad(run.output.float().sum(), list(model.parameters())), wanted, strict=True):
        assert own.dtype == other.dtype and own.layout == other.layout
        assert_same(own.to_dense().bfloat16(), other.to_dense().bfloat16())
