"""Embedding tables in whole models: sizes, modes, odd values and layouts, shared and changed tables, training loops.

Each result is that of a twin of the model in float64 that eager PyTorch runs.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.backend.report.report import collect
from tests.backend.harness import assert_same

BAD = (float("nan"), float("inf"), -float("inf"))
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class Model(nn.Module):
    """Sums of bags by offsets, means of bags of a length, and a mean over embeddings that leaves out padding."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.sums = nn.EmbeddingBag(50, 16, mode="sum", sparse=sparse)
        self.means = nn.EmbeddingBag(40, 16, mode="mean", sparse=sparse)
        self.words = nn.Embedding(30, 16, sparse=sparse)
        self.out = nn.Linear(48, 3)

    def forward(self, entries: Tensor, offsets: Tensor, rows: Tensor, words: Tensor) -> Tensor:
        known = (words != 0).to(self.out.weight.dtype)
        mean = (self.words(words) * known.unsqueeze(-1)).sum(1) / known.sum(1, keepdim=True).clamp(min=1)
        result: Tensor = self.out(torch.cat([self.sums(entries, offsets), self.means(rows), mean], 1).tanh())
        return result

    @property
    def tables(self) -> list[nn.Parameter]:
        return [self.sums.weight, self.means.weight, self.words.weight]


def batch(size: int, integers: torch.dtype = torch.int64) -> Batch:
    random = torch.Generator().manual_seed(size)
    counts = torch.randint(0, 4, (size,), generator=random)
    entries = torch.randint(0, 50, (int(counts.sum()),), generator=random).to(integers)
    rows, words = (torch.randint(0, most, (size, n), generator=random).to(integers) for most, n in ((40, 3), (30, 5)))
    return entries, (counts.cumsum(0) - counts).to(integers), rows, words


def twins(model: nn.Module, **options: Any) -> tuple[Callable[..., Any], Any]:
    """The model, compiled with all bags ours, and its twin in float64."""
    return compiled(model, **options), copy.deepcopy(model).double()


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    strict = {"dense": "eager", "strict": True, "min_gain": 0}
    return torch.compile(model, backend="sparse", fullgraph=True, options=strict, **options)


def dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.to_dense() if grad.is_sparse else grad


def assert_alike(model: nn.Module, twin: nn.Module, *, gradients: bool = True) -> None:
    """Parameters, or their gradients, are those of the twin."""
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if gradients and ours.grad is not None:
            assert ours.grad.layout is (theirs.grad.layout if theirs.grad is not None else None)
            same(dense(ours.grad), dense(theirs.grad))
        elif not gradients:
            same(ours.detach(), theirs.detach())


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_every_batch_in_every_mode(sparse: bool, dynamic: bool | None) -> None:
    model = Model(sparse)
    call, twin = twins(model, dynamic=dynamic)
    for size in (4, 7, 1, 0) if dynamic is None else (4, 1):
        for integers in (torch.int64, torch.int32) if size == 4 else (torch.int64,):
            given = batch(size, integers)
            model.zero_grad(), twin.zero_grad()
            with collect() as collected:
                result, expected = call(*given), twin(*given)
            assert all(decision.sparse for decision in collected.decisions if "out" not in decision.name)
            result.square().sum().backward(), expected.square().sum().backward()
            same(result, expected)
            assert_alike(model, twin)
    model.eval(), twin.eval()
    with torch.no_grad():
        same(call(*given), twin(*given))
    with torch.inference_mode():
        same(call(*given), twin(*given))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_sizes_that_only_the_data_tell(sparse: bool, grad: bool) -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.EmbeddingBag(50, 16, mode="mean", sparse=sparse)
            self.words = nn.Embedding(50, 16, sparse=sparse)

        def forward(self, which: Tensor, rows: Tensor) -> Tensor:
            found = rows[which.nonzero()[:, 0]]
            by_offsets = self.bags(found.flatten(), torch.zeros(1, dtype=torch.int64))
            result: Tensor = self.bags(found) + self.words(found).sum(1) * self.words(found).mean(1) + by_offsets
            return result

    model = Chosen()
    call, twin = twins(model)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.set_grad_enabled(grad):
        for which in (torch.rand(20) > 0.5, torch.rand(20) > 0.2, torch.zeros(20, dtype=torch.bool)):
            rows = torch.randint(0, 50, (20, 4))
            result, expected = call(which, rows), twin(which, rows)
            same(result, expected)
            if grad:
                model.zero_grad(), twin.zero_grad()
                result.square().sum().backward(), expected.square().sum().backward()
                assert_alike(model, twin)


def test_marked_sizes_make_one_graph() -> None:
    model = Model(True)
    call, twin = twins(model)
    with collect() as collected:
        for size in (4, 7, 9):
            given = batch(size)
            for tensor in given:
                torch._dynamo.mark_dynamic(tensor, 0)
            same(call(*given), twin(*given))
    assert len([decision for decision in collected.decisions if decision.name == "sums.weight"]) == 1


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_nan_and_infinity_in_a_table_stay_in_their_bags(mode: Any, sparse: bool) -> None:
    if sparse and mode == "max":
        pytest.skip("torch has no sparse gradients of maxima")
    for bad in BAD:
        model = nn.EmbeddingBag(20, 8, mode=mode, sparse=sparse, padding_idx=3)
        with torch.no_grad():
            model.weight[5, 2] = model.weight[3] = bad
            model.weight[7, 2] = -bad
        call, twin = twins(model)
        bags = torch.tensor([[5, 1, 3], [1, 2, 4], [5, 7, 3], [3, 3, 3], [7, 5, 1]])
        result, expected = call(bags), twin(bags)
        result.sum().backward(), expected.sum().backward()
        same(result, expected)
        assert_alike(model, twin)


@pytest.mark.parametrize("sparse", [False, True])
def test_weights_that_are_nan_or_infinite_meet_zeros_as_in_torch(sparse: bool) -> None:
    for bad in BAD[:2]:
        model = nn.EmbeddingBag(20, 8, mode="sum", sparse=sparse)
        with torch.no_grad():
            model.weight[4], model.weight[6, 1] = 0, bad
        call, twin = twins(model)
        entries, offsets = torch.tensor([1, 2, 4, 4, 6, 1]), torch.tensor([0, 2, 2, 5])
        weights = torch.tensor([1.0, bad, bad, 0, 0, 2], requires_grad=True)
        wide = weights.detach().double().requires_grad_()
        result, expected = call(entries, offsets, weights), twin(entries, offsets, wide)
        result.sum().backward(), expected.sum().backward()
        same(result, expected)
        same(dense(weights.grad), dense(wide.grad))
        assert_alike(model, twin)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_indices_of_any_layout(sparse: bool, integers: torch.dtype) -> None:
    model = nn.EmbeddingBag(50, 16, mode="mean", sparse=sparse)
    call, twin = twins(model, dynamic=True)
    base = torch.randint(0, 50, (6, 10)).to(integers)
    by_lines = (base.t(), base[:, ::2], base[::2, 1:], base[:0], base[:1], base[:1].expand(4, 10))
    ends = torch.tensor([0, 1, 2, 3, 4, 5]).to(integers)
    by_offsets = [
        (base.flatten()[::2], ends[::2]),
        (base.flatten(), ends),
        (base[0, :0], ends[:1] * 0),
        (base[0, :0], ends[:0]),
    ]
    for number, given in enumerate((*((each,) for each in by_lines), *by_offsets)):
        if number % 3 == 0:  # Dynamo compiles a graph for each kind of strides, and at most 8
            torch._dynamo.reset()
        model.zero_grad(), twin.zero_grad()
        result, expected = call(*given), twin(*given)
        result.square().sum().backward(), expected.square().sum().backward()
        same(result, expected)
        assert_alike(model, twin)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_transposed_table_is_looked_up(sparse: bool) -> None:
    table, rows = nn.Parameter(torch.randn(16, 50).t()), torch.randint(0, 50, (6, 3))

    def bags() -> Tensor:
        return F.embedding_bag(rows, table, mode="sum", sparse=sparse)

    results = []
    for call in (compiled(bags), bags):
        call().square().sum().backward()
        results.append((call().detach(), dense(table.grad)))
        table.grad = None
    for ours, theirs in zip(*results, strict=True):
        same(ours, theirs)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_table_may_be_shared(sparse: bool) -> None:
    """By a bag and an embedding, and by the layer that gives the logits if gradients are dense."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.bags = nn.Embedding(50, 16, sparse=sparse), nn.EmbeddingBag(50, 16, sparse=sparse)
            self.bags.weight, self.out = self.words.weight, nn.Linear(16, 50, bias=False)
            if not sparse:
                self.out.weight = self.words.weight

        def forward(self, rows: Tensor) -> Tensor:
            result: Tensor = self.out(self.words(rows).sum(1) + self.bags(rows))
            return result

    model = Tied()
    call, twin = twins(model)
    for size in (4, 6):
        rows = torch.randint(0, 50, (size, 3))
        result, expected = call(rows), twin(rows)
        result.square().sum().backward(), expected.square().sum().backward()
        same(result, expected)
        assert_alike(model, twin)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("given", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_what_torch_alone_can_do_stays_with_torch(kind: type[nn.Module], given: dict[str, Any]) -> None:
    model = kind(50, 16, **given)
    twin, rows = copy.deepcopy(model), torch.randint(0, 50, (5, 4))
    with collect() as collected:
        result = torch.compile(model, backend="sparse", options={"dense": "eager"})(rows)
    expected = twin(rows)
    result.square().sum().backward(), expected.square().sum().backward()
    assert not any(decision.sparse for decision in collected.decisions)
    assert_same(result, expected)
    assert_alike(model, twin)
    assert_alike(model, twin, gradients=False)


@pytest.mark.parametrize("grad", [False, True])
def test_tables_are_read_as_they_are(grad: bool) -> None:
    model, given, file = Model(False), batch(5), io.BytesIO()
    with torch.set_grad_enabled(grad):
        call = compiled(model)

        def check(call: Callable[..., Any], model: nn.Module) -> None:
            same(call(*given), copy.deepcopy(model).double()(*given))

        check(call, model)
        with torch.no_grad():
            model.sums.weight.mul_(2)
        model.words.weight.data.add_(1)
        check(call, model)
        other = copy.deepcopy(model)
        call_other = compiled(other)
        with torch.no_grad():
            model.sums.weight.mul_(2)
        check(call_other, other)
        check(call, model)
        torch.save(model.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        same(call_other(*given), call(*given))
        other.load_state_dict(Model(False).state_dict(), assign=True)
        check(call_other, other)
        check(call_other, other.double())


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_several_backward_passes_add_up(sparse: bool) -> None:
    model = Model(sparse)
    call, twin = twins(model)
    optimizers = [torch.optim.Adagrad(each.parameters(), lr=0.1, eps=0.1) for each in (model, twin)]
    for step in range(3):
        for size in (4, 6):
            call(*batch(size)).square().sum().backward(), twin(*batch(size)).square().sum().backward()
        assert_alike(model, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
        assert_alike(model, twin, gradients=False)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_graph_may_be_kept_for_a_second_backward_pass(sparse: bool) -> None:
    model = Model(sparse)
    call, twin = twins(model)
    for result in (call(*batch(5)), twin(*batch(5))):
        result.sum().backward(retain_graph=True)
        result.square().sum().backward()
    assert_alike(model, twin)


def test_a_second_derivative_is_an_error_of_torch() -> None:
    model = Model(True)
    result = compiled(model)(*batch(5))
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        (grad,) = torch.autograd.grad(result.square().sum(), [model.out.weight], create_graph=True)
        grad.sum().backward()


@pytest.mark.parametrize("sparse", [False, True])
def test_hooks_see_the_gradients(sparse: bool) -> None:
    """Those that scale a gradient, and those that send it elsewhere once it is complete, as DistributedDataParallel does."""
    model = Model(sparse)
    call, twin = twins(model)
    sent: list[list[Tensor]] = [[], []]
    for each, into in zip((model, twin), sent, strict=True):
        for parameter in each.parameters():
            parameter.register_hook(lambda grad: grad * 2)
            parameter.register_post_accumulate_grad_hook(lambda p, into=into: into.append(dense(p.grad).clone()))
    call(*batch(5)).square().sum().backward(), twin(*batch(5)).square().sum().backward()
    assert_alike(model, twin)
    assert [len(each) for each in sent] == [5, 5]


@pytest.mark.parametrize("sparse", [False, True])
def test_scaled_losses_and_clipped_values(sparse: bool) -> None:
    model = Model(sparse)
    call, twin = twins(model)
    for each, function in ((model, call), (twin, twin)):
        optimizer, scaler = torch.optim.SGD(each.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for size in (4, 6):
            scaler.scale(function(*batch(size)).square().sum()).backward()
            scaler.unscale_(optimizer)
            if not sparse:
                torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            torch.nn.utils.clip_grad_value_([each.out.weight], 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_alike(model, twin, gradients=False)


def test_adam_with_lazy_moments() -> None:
    model = Model(True)
    call, twin = twins(model)
    for each, function in ((model, call), (twin, twin)):
        of_tables, others = torch.optim.SparseAdam(each.tables, lr=0.1), torch.optim.Adam(each.out.parameters())
        for size in (4, 6, 5):
            function(*batch(size)).square().sum().backward()
            of_tables.step(), others.step()
            each.zero_grad()
    assert_alike(model, twin, gradients=False)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_frozen_table_beside_others_has_no_gradient(sparse: bool) -> None:
    model = Model(sparse)
    model.sums.weight.requires_grad_(False)
    call, twin = twins(model)
    call(*batch(5)).square().sum().backward(), twin(*batch(5)).square().sum().backward()
    assert model.sums.weight.grad is None
    assert_alike(model, twin)


@pytest.mark.parametrize(
    "given", [{"lr": 0.1}, {"lr": torch.tensor(0.1), "maximize": True}, {"lr": 0.1, "weight_decay": 0.0, "foreach": True}]
)
def test_sgd_steps_the_rows_that_have_a_gradient(given: dict[str, Any]) -> None:
    model = Model(True)
    call, twin = twins(model)
    for each, function in ((model, call), (twin, twin)):
        optimizer = torch.optim.SGD(each.parameters(), **given)
        for size in (4, 6, 0):
            function(*batch(size)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not optimizer.state_dict()["state"].get(0)
    assert_alike(model, twin, gradients=False)
