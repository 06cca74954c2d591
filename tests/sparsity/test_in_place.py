"""Methods that write to a SparseTensor: it has the contents that a dense tensor would have, in whatever pattern they need."""

import copy
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import gossamer
from gossamer import Format, GossamerError, SparseTensor
from gossamer.backend import sparse as backend
from gossamer.sparsity.operations.same_pattern import PatternError
from tests.backend.harness import prune_
from tests.sparsity.made import matrix, sparse

pytestmark = pytest.mark.filterwarnings("ignore:SparseTensor has no sparse")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


STATEMENTS = [
    "a += b", "a -= b", "a += x", "a -= x", "a *= b", "a *= 2", "a /= 2", "a **= 2", "a += a", "a *= x",
    "a.add_(b, alpha=2)", "a.mul_(b)", "a.clamp_(-1, 1)", "a.clamp_(min=1)", "a.relu_()",
    "a.sin_()", "a.exp_()", "a.pow_(2)", "a.copy_(b)", "a.copy_(x)",
    "a.copy_(b[:1])", "a.div_(4)", "a.mul_(x)", "a.masked_fill_(x > 0, 3)", "a.addcmul_(b, b)", "a.lerp_(b, 0.5)",
    "a.nan_to_num_()", "a.index_add_(0, torch.tensor([0]), x[:1])", "a[0] = 0", "a[1] = x[1]", "a[a > 1] = 7",
    "a[0, 0] = 5", "a[:, 2:4] = b[:, 2:4]", "a.fill_(0)", "a.zero_()",
    "a.fill_diagonal_(3)",
]  # fmt: skip


@pytest.mark.parametrize("name", ["CSR", "COO", "BSR"])
@pytest.mark.parametrize("statement", STATEMENTS)
def test_statements(statement: str, name: str) -> None:
    given = {"a": matrix(4, 6), "b": matrix(4, 6), "x": torch.randn(4, 6)}
    ours = {"a": sparse(given["a"].clone(), name), "b": sparse(given["b"]), "x": given["x"]}
    before, other = ours["a"], given["a"].clone()
    before @ other.t()  # which keeps something of it
    exec(statement, {"torch": torch}, ours)
    exec(statement, {"torch": torch}, given)
    assert ours["a"] is before
    assert before.format.levels == sparse(given["b"], name).format.levels
    torch.testing.assert_close(before.to_dense(), given["a"])
    torch.testing.assert_close(before @ other.t(), given["a"] @ other.t())
    torch.testing.assert_close(ours["b"].to_dense(), given["b"])


def test_into_a_dense_tensor() -> None:
    a, x = matrix(4, 6), torch.randn(4, 6)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    for given, plain in ((sparse(a), ours), (a, theirs)):
        y = plain * 1
        y += given
        y.mul_(given)
        y.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        torch.ones(6).add_(sparse(a))


def test_dense_tensors_take_sparse_parts_and_masks() -> None:
    def function(a: Tensor) -> tuple[Tensor, ...]:
        padded, filled = torch.zeros(8, 6), x.clone()
        padded[2:6] = a
        filled[a.bool()] = 3
        return padded, filled, x[0].expand_as(a), torch.masked_select(x, a.bool()), torch.masked_select(a, a.bool())

    dense, x = matrix(4, 6), torch.randn(4, 6)
    for ours, theirs in zip(function(sparse(dense)), function(dense), strict=True):
        torch.testing.assert_close(ours.to_dense(), theirs)


@pytest.mark.parametrize("compiled", [False, True])
def test_modules_work_in_place(compiled: bool) -> None:
    network = nn.Sequential(nn.LeakyReLU(0.5, inplace=True), nn.Dropout(0.5, inplace=True), nn.ReLU(inplace=True))

    def function(a: Tensor) -> Tensor:
        b = a * 1
        network(b)
        return b

    weight = sparse(matrix(4, 6)).requires_grad_()
    result = (torch.compile(function, backend=backend, fullgraph=True) if compiled else function)(weight)
    given = weight.detach() * 1
    assert network(given) is given
    dense = weight.detach().to_dense()
    kept = result.detach().to_dense() / F.relu(dense).where(dense > 0, 1)  # 0 or 2
    torch.testing.assert_close(kept, torch.where(result.detach().to_dense() > 0, 2.0, 0.0))
    (gradient,) = torch.autograd.grad(result.sum(), weight)
    torch.testing.assert_close(gradient.to_dense(), kept)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        F.relu(weight, inplace=True)


ACTIVATIONS = (nn.CELU, nn.ELU, nn.Hardswish, nn.Hardtanh, nn.Mish, nn.ReLU6, nn.SELU, nn.SiLU)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_that_keep_zeros_work_in_place_at_the_entries(activation: Callable[..., nn.Module]) -> None:
    weight = sparse(3 * matrix(4, 6)).requires_grad_()
    dense = weight.detach().to_dense().requires_grad_()
    results = []
    for leaf in (weight, dense):
        given = leaf * 2
        assert activation(inplace=True)(given) is given
        results.append(given)
    torch.testing.assert_close(results[0].to_dense(), results[1])
    results[0].sum().backward()
    results[1].sum().backward()
    assert weight.grad is not None and dense.grad is not None
    torch.testing.assert_close(weight.grad.to_dense(), dense.grad * (dense != 0))


def test_an_activation_that_fills_zeros_is_written_by_value_or_refused() -> None:
    weight = sparse(matrix(4, 6))
    expected = F.hardsigmoid(weight.to_dense())
    with pytest.raises(GossamerError, match="hardsigmoid, which changes the pattern"):
        F.hardsigmoid(weight.clone().requires_grad_() * 1, inplace=True)
    F.hardsigmoid(weight, inplace=True)
    torch.testing.assert_close(weight.to_dense(), expected)


OPTIMIZERS = [
    torch.optim.Adamax, torch.optim.LBFGS, torch.optim.Rprop, torch.optim.Adadelta, torch.optim.RAdam, torch.optim.ASGD,
    lambda given: torch.optim.AdamW(given, amsgrad=True), lambda given: torch.optim.SGD(given, 0.1, 0.9, nesterov=True),
]  # fmt: skip


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizers(make: Callable[..., torch.optim.Optimizer]) -> None:
    dense, x = matrix(4, 4), torch.randn(4, 2)
    kept = (dense != 0).float()
    results = []
    for weight in (torch.nn.Parameter(sparse(dense)), torch.nn.Parameter(dense.clone())):
        optimizer = make([weight])

        def loss(weight: Tensor = weight, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            lost = ((weight if isinstance(weight, SparseTensor) else weight * kept) @ x).square().mean()
            lost.backward()
            return lost

        for _ in range(3):
            optimizer.step(loss)
        results.append(weight.detach().to_dense() * kept)
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def test_what_is_copied_is_not_shared() -> None:
    a, b = sparse(torch.eye(3)), sparse(torch.ones(3, 3))
    a.copy_(b)
    a.mul_(2)
    assert b.values().eq(1).all()


def test_numbers_change_what_is_stored() -> None:
    a = sparse(torch.eye(3))
    a.add_(1)
    torch.testing.assert_close(a.to_dense(), 2 * torch.eye(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.t_(), "t_, which would change the shape"),
        (lambda a: a.int().mul_(0.5), "can't be cast"),
        (lambda a: a.requires_grad_().clone().add_(sparse(torch.ones(3, 4))), "while autograd records it"),
        (lambda a: a.to_format(Format.nm(2, 4)).add_(sparse(torch.ones(3, 4))), "2:4"),
    ],
)
def test_what_cannot_be(change: Callable[[SparseTensor], object], message: str) -> None:
    with pytest.raises((GossamerError, RuntimeError), match=message):
        change(sparse(torch.eye(3, 4)))


def test_gradients_where_the_pattern_stays() -> None:
    dense = matrix(4, 6).double()
    a = sparse(dense)

    def wave(values: Tensor) -> Tensor:
        b = a.with_values(values) * 1
        b.sin_()
        b.mul_(3)
        return b.values()

    assert torch.autograd.gradcheck(wave, a.values().clone().requires_grad_())


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_what_is_written_by_stored_values(compiled: bool) -> None:
    a, x = sparse(matrix(3, 4).double()), matrix(1, 4).double()

    def function(a: Tensor, x: Tensor) -> Tensor:
        return torch.addcdiv(a.clone().abs_(), x, x + 4) * 2

    called = torch.compile(function, backend=backend, fullgraph=True) if compiled else function

    def gradients(a: Tensor, x: Tensor, called: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [each.requires_grad_() for each in (a if isinstance(a, SparseTensor) else a.clone(), x.clone())]
        return torch.autograd.grad(called(*leaves).square().sum(), leaves)

    ours, theirs = gradients(a.clone().detach(), x, called), gradients(a.to_dense(), x, function)
    torch.testing.assert_close(ours[0].to_dense(), torch.where(a.to_dense() != 0, theirs[0], 0))
    torch.testing.assert_close(ours[1], theirs[1])


def test_gradients_of_complex_values_are_of_conjugates() -> None:
    a = sparse(matrix(3, 4) * (1 + 2j)).to(torch.complex128)

    def function(values: Tensor) -> Tensor:
        b = a.with_values(values) * 1
        b.div_(a * 3)
        return b.sqrt_().values()

    assert torch.autograd.gradcheck(function, a.values().clone().requires_grad_())


def test_in_a_graph_where_the_pattern_stays() -> None:
    def function(a: Tensor) -> Tensor:
        b = a * 2
        b.clamp_(-1, 4)
        b.tanh_()
        return b

    dense = matrix(4, 6)
    ours = torch.compile(function, backend=backend, fullgraph=True)(sparse(dense))
    torch.testing.assert_close(ours.to_dense(), function(dense))


def test_a_graph_compares_patterns_when_it_runs() -> None:
    def averaged(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        state, copied, listed = a.clone(), a.clone(), [a.clone()]
        state.mul_(0.5).add_(b)
        torch._foreach_lerp_(listed, [b], 0.25)
        copied.copy_(b)
        return state, copied, listed[0]

    called = torch.compile(averaged, backend=backend, fullgraph=True)
    one, other = torch.diag(torch.arange(1.0, 5)), torch.diag(torch.arange(5.0, 9))
    for ours, theirs in zip(called(sparse(one), sparse(other)), averaged(one, other), strict=True):
        torch.testing.assert_close(ours.to_dense(), theirs)
    with pytest.raises(PatternError, match="in a graph have different patterns"):
        called(sparse(one), sparse(other.flip(0)))  # with equally many nonzeros


@pytest.mark.parametrize("format", ["CSR", "CSC", "COO", Format.bsr(4, 4)], ids=str)
@pytest.mark.parametrize("fill", [nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.trunc_normal_, nn.init.ones_])
def test_initialisation_draws_new_stored_values(fill: Callable[[Tensor], Tensor], format: str | Format) -> None:
    torch.manual_seed(0)
    pruned = torch.randn(42, 61) * (torch.rand(42, 61) < 0.3)
    weight = nn.Parameter(SparseTensor.from_dense(pruned, format))
    stored = weight.detach().fill_(1).to_dense() != 0
    fill(weight)
    expected, found = fill(torch.empty(42, 61)), weight.to_dense().detach()
    assert torch.equal(found != 0, stored)
    torch.testing.assert_close(found[stored].std(), expected.std(), rtol=0.1, atol=1e-6)


@pytest.mark.parametrize("values", ["the same pattern", "another one", "dense", "dense, within the pattern"])
def test_data_is_assigned(values: str) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(sparse(matrix(9, 7)))
    before = weight.to_dense().detach()
    data = {
        "the same pattern": lambda: weight.data * 2,
        "another one": lambda: SparseTensor.from_dense(torch.eye(9, 7)),
        "dense": lambda: torch.eye(9, 7) + before,
        "dense, within the pattern": lambda: torch.where(before > 0, before, 0),
    }[values]()
    expected, stored = data.to_dense(), weight.nnz  # type: ignore[attr-defined]
    weight.data = data
    assert isinstance(weight, SparseTensor)
    assert weight.requires_grad
    torch.testing.assert_close(weight.to_dense().detach(), expected)
    assert values in ("another one", "dense") or weight.nnz == stored
    (weight @ torch.ones(7)).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.to_dense(), (weight.detach().fill_(1).to_dense() != 0).float())


def test_data_of_another_shape_is_refused() -> None:
    weight = nn.Parameter(sparse(matrix(9, 7)))
    with pytest.raises(GossamerError, match=r"\.data = torch.float32 \[7, 9\] on cpu .* make a new parameter"):
        weight.data = torch.ones(7, 9)
    with pytest.raises(GossamerError, match=r"torch.float64"):
        weight.data = torch.ones(9, 7, dtype=torch.float64)


@pytest.mark.parametrize("detach", [lambda w: w.data, lambda w: w.detach()], ids=["data", "detach"])
def test_what_is_written_to_detached_tensors_reaches_the_parameter(detach: Callable[[Tensor], Tensor]) -> None:
    weight = nn.Parameter(sparse(matrix(9, 7)))
    before = float(weight.sum())
    detach(weight).mul_(2)
    assert float(weight.sum()) == 2 * before


@pytest.mark.parametrize("detach", [lambda w: w.data, lambda w: w.detach()], ids=["data", "detach"])
@pytest.mark.parametrize("write", [lambda a, b: a.copy_(b), lambda a, b: a.add_(b), lambda a, b: a.__setitem__(0, 5.0)])
def test_another_pattern_reaches_the_leaf(
    detach: Callable[[Tensor], SparseTensor], write: Callable[[Tensor, Tensor], object]
) -> None:
    first, second, third = (matrix(9, 7) for _ in range(3))
    weight = nn.Parameter(sparse(first))
    alias, expected = detach(weight), first.clone()
    with torch.no_grad():
        write(detach(weight), sparse(second))
        write(expected, second)
    for each in (weight.detach(), weight.detach().data):
        torch.testing.assert_close(each.to_dense(), expected)
        torch.testing.assert_close(each @ torch.ones(7), expected.sum(1))
    alias.copy_(sparse(third))  # the parameter has had other arrays since
    torch.testing.assert_close(weight.detach().to_dense(), expected)
    torch.testing.assert_close(alias.to_dense(), third)
    alias = detach(weight)
    weight.data = sparse(second)
    alias.copy_(sparse(first))
    torch.testing.assert_close(weight.detach().to_dense(), second)
    torch.testing.assert_close(alias.to_dense(), first)


def test_checkpoints_of_torch_load_other_nonzeros(tmp_path: Path) -> None:
    models = [gossamer.store_sparse(prune_(nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 4)), share)) for share in (0.3, 0.4)]
    first, second = models
    state_dict_saver.save({"model": first.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    loaded, x = {"model": second.state_dict()}, torch.randn(5, 12)
    state_dict_loader.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    torch.testing.assert_close(second(x), first(x))
    second.load_state_dict(loaded["model"])
    torch.testing.assert_close(second(x), first(x))


def test_what_is_detached_again_and_again_keeps_nothing_alive() -> None:
    a = sparse(matrix(9, 7))
    for _ in range(3):
        detached = a.detach()
        between, a = weakref.ref(detached), detached.detach()
        del detached
        assert between() is None
    given, weight = weakref.ref(a), nn.Parameter(a)
    del a
    assert given() is None
    assert weight.is_leaf


def test_vectors_become_parameters() -> None:
    torch.manual_seed(0)
    dense = prune_(nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 4)), 0.3)
    stored, x = gossamer.store_sparse(copy.deepcopy(dense)), torch.randn(5, 12)
    vector = nn.utils.parameters_to_vector(stored.parameters()).detach() * 2
    for model in (dense, stored):
        nn.utils.vector_to_parameters(vector, model.parameters())
    torch.testing.assert_close(stored(x), dense(x))


def test_lbfgs_on_stored_weights() -> None:
    torch.manual_seed(0)
    model, x = gossamer.store_sparse(prune_(nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 4)), 0.3)), torch.randn(5, 12)
    patterns = [p.nnz for p in model.parameters() if isinstance(p, SparseTensor)]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=20)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(x) - 1).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    optimizer.step(closure)
    assert losses[-1] < 0.01 * losses[0]
    assert [p.nnz for p in model.parameters() if isinstance(p, SparseTensor)] == patterns
