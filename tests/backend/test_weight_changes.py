"""A weight that changes after compilation is noticed, whatever way it changes."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.backend.run import lost_zeros, packed_weights
from gossamer.backend.run.packed_weights import Packings
from gossamer.dialects.format import Format
from tests.backend.harness import Run, assert_same, compile_and_run, prune_, pruned


@pytest.fixture
def model() -> nn.Module:
    return prune_(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64))).eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 64)


def assert_follows(run: Run, model: nn.Module, x: Tensor) -> None:
    for _ in range(3):
        with torch.no_grad():
            assert_same(run.function(x), model(x))


def test_same_pattern(model: nn.Module, x: Tensor) -> None:
    run = compile_and_run(model, x, regions=2)
    with torch.no_grad():
        model[0].weight.mul_(3)
    assert_follows(run, model, x)


def test_new_pattern(model: nn.Module, x: Tensor) -> None:
    run = compile_and_run(model, x, regions=2)
    for _ in range(3):
        with torch.no_grad():
            model[0].weight.copy_(pruned(48, 64))
        assert_follows(run, model, x)


def test_new_pattern_at_every_call(model: nn.Module, x: Tensor) -> None:
    run = compile_and_run(model, x, regions=2)
    for _ in range(5):
        with torch.no_grad():
            model[0].weight.copy_(pruned(48, 64))
            assert_same(run.function(x), model(x))


def test_it_becomes_dense_and_sparse_again(model: nn.Module, x: Tensor) -> None:
    run = compile_and_run(model, x, regions=2)
    for density in (1.0, 0.1):
        with torch.no_grad():
            model[0].weight.copy_(pruned(48, 64, density=density))
        assert_follows(run, model, x)


def test_load_state_dict(model: nn.Module, x: Tensor) -> None:
    run = compile_and_run(model, x, regions=2)
    other = prune_(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64)))
    model.load_state_dict(other.state_dict())
    assert_follows(run, model, x)
    model.load_state_dict(prune_(copy.deepcopy(other)).state_dict(), assign=True)
    assert_follows(run, model, x)


def test_optimizer_step(model: nn.Module, x: Tensor) -> None:
    run = compile_and_run(model, x, regions=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        assert_follows(run, model, x)


def test_new_parameters_again_and_again(model: nn.Module, x: Tensor) -> None:
    """Freed memory is reused for the next parameter, at the same address and version."""
    run = compile_and_run(model, x, regions=2)
    for _ in range(5):
        model[0].weight = nn.Parameter(pruned(48, 64))
        gc.collect()
        with torch.no_grad():
            assert_same(run.function(x), model(x))


def test_data_is_replaced(model: nn.Module, x: Tensor) -> None:
    run = compile_and_run(model, x, regions=2)
    model[0].weight.data = pruned(48, 64)
    assert_follows(run, model, x)


def double(weight: Tensor) -> None:
    weight.data.mul_(2)


def merge(weight: Tensor) -> None:
    """As adapters are merged."""
    weight.data += torch.randn(48, 2) @ torch.randn(2, 64)


def copy_average(weight: Tensor) -> None:
    """As averages of weights are put in their place."""
    weight.data.copy_(pruned(48, 64))


def with_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[:] = pruned(48, 64).numpy()


UNCOUNTED: dict[str, Callable[[Tensor], None]] = {
    "scaled": double,
    "merged": merge,
    "averaged": copy_average,
    "NumPy": with_numpy,
}


@pytest.mark.parametrize("name", UNCOUNTED)
@pytest.mark.parametrize("masked", [False, True])
def test_uncounted_writes_to_most_of_a_weight_are_seen(name: str, masked: bool, x: Tensor) -> None:
    weight, mask = nn.Parameter(pruned(48, 64)), (torch.rand(48, 64) < 0.2).float()

    def product(x: Tensor) -> Tensor:
        return F.linear(x, weight * mask if masked else weight)

    run = compile_and_run(product, x, regions=1)
    for _ in range(3):
        UNCOUNTED[name](weight)
        with torch.no_grad():
            assert_same(run.function(x), product(x))
            assert_same(run.function(x), product(x))


def test_all_uncounted_writes_are_seen_by_full_verification(model: nn.Module, x: Tensor) -> None:
    run = compile_and_run(model, x, verify="full", regions=2)
    model[0].weight.data[47, 63] = 3
    assert_follows(run, model, x)
    model[0].weight.detach().numpy()[:] = pruned(48, 64).numpy()
    assert_follows(run, model, x)


def test_parameters_in_one_vector(model: nn.Module, x: Tensor) -> None:
    """Of each parameter torch counts the writes to itself, not those to the vector."""
    run = compile_and_run(model, x, regions=2)
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    for _ in range(3):
        vector.mul_(1.5)
        nn.utils.vector_to_parameters(vector, model.parameters())
        assert_follows(run, model, x)


def test_shared_memory(x: Tensor, tmp_path: Path) -> None:
    """Each process counts its own writes to it, as each tensor over the same file does."""
    first, second = (torch.from_file(str(tmp_path / "weight"), shared=True, size=48 * 64).view(48, 64) for _ in range(2))
    first.copy_(pruned(48, 64))
    layer = nn.Linear(64, 48)
    layer.weight = nn.Parameter(first)
    run = compile_and_run(layer, x, regions=1)
    for _ in range(3):
        second[torch.randint(48, ()), torch.randint(64, ())] = 3
        assert_follows(run, layer, x)


def test_memory_that_becomes_shared(model: nn.Module, x: Tensor) -> None:
    run = compile_and_run(model, x, regions=2)
    model.share_memory()
    assert_follows(run, model, x)
    model[0].weight.data[47, 63] = 3  # uncounted, as what another process writes
    assert_follows(run, model, x)


def test_swapped_tensors(model: nn.Module, x: Tensor) -> None:
    run = compile_and_run(model, x, regions=2)
    for _ in range(2):
        for parameter in model.parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(pruned(*parameter.shape)))
        assert_follows(run, model, x)


def test_the_mask_changes(x: Tensor) -> None:
    weight, mask = nn.Parameter(torch.randn(48, 64)), torch.rand(48, 64) < 0.2
    run = compile_and_run(lambda x: F.linear(x, weight * mask), x, regions=1)
    with torch.no_grad():
        mask.copy_(torch.rand(48, 64) < 0.2)
        for _ in range(3):
            assert_same(run.function(x), F.linear(x, weight * mask))


def test_a_weight_that_the_graph_itself_changes(x: Tensor) -> None:
    class Decaying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", pruned(48, 64))

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.weight)
            self.weight.mul_(0.5)
            return y + F.linear(x, self.weight)

    model = Decaying()
    twin = copy.deepcopy(model)
    run = compile_and_run(model, x, regions=2)
    assert_same(run.output, twin(x))
    for _ in range(3):
        assert_same(run.function(x), twin(x))


def test_inference_tensors(x: Tensor) -> None:
    with torch.inference_mode():
        weight = pruned(48, 64)
        run = compile_and_run(lambda x: F.linear(x, weight), x, regions=1)
        assert_same(run.function(x), F.linear(x, weight))
        for _ in range(3):  # of which torch keeps no count
            weight.mul_(2)
            assert_same(run.function(x), F.linear(x, weight))


def test_copies_and_pickles_compile_for_themselves(model: nn.Module, x: Tensor) -> None:
    run = compile_and_run(model, x, regions=2)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.copy_(pruned(48, 64))
    assert_same(torch.compile(twin, backend="sparse")(x).detach(), twin(x).detach())
    restored = pickle.loads(pickle.dumps(model))
    assert_same(torch.compile(restored, backend="sparse")(x).detach(), model(x).detach())
    buffer = io.BytesIO()
    torch.save(run.function.state_dict(), buffer)
    assert_follows(run, model, x)


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("mode", ["no_grad", "eval", "train"])
def test_a_compiled_model_holds_no_tensors(model: nn.Module, dense: str, mode: str) -> None:
    x = torch.randn(5, 64)
    model.train(mode == "train")
    run = compile_and_run(model, x, dense=dense, grad=mode != "no_grad", regions=3 if mode == "train" else 2)
    dead = [weakref.ref(tensor.untyped_storage()) for tensor in (x, model[0].weight)]
    del x
    run.output = None
    model[0].weight = nn.Parameter(pruned(48, 64))
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


def identity(weight: Tensor) -> Tensor:
    return weight


def test_packings_die_with_their_tensor() -> None:
    kept = Packings("identity", identity, Format.CSR)
    weight = pruned(48, 64)
    assert kept.current([weight], 1.0) is not None and len(kept) == 1
    view = weight[:]
    del weight
    gc.collect()
    assert len(kept) == 1, "a view keeps the storage"
    del view
    gc.collect()
    assert len(kept) == 0


def test_packings_are_kept_refreshed_and_renewed() -> None:
    kept = Packings("identity", identity, Format.CSR)
    weight = pruned(48, 64)
    first = kept.current([weight], 1.0)
    assert kept.current([weight], 1.0) is first and first is not None and not first.has_source
    weight.mul_(2)
    first = kept.current([weight], 1.0)
    assert kept.current([weight], 1.0) is first and first is not None and first.matches(weight)
    weight.mul_(2)
    assert kept.current([weight], 1.0) is first and first.matches(weight), "in place from the second change on"
    weight.copy_(pruned(48, 64))
    second = kept.current([weight], 1.0)
    assert second is not None and second is not first and second.matches(weight)


def test_packings_shrink_when_a_pattern_has_lost_values() -> None:
    kept = Packings("identity", identity, Format.CSR)
    weight = pruned(48, 64, density=0.5)
    for _ in range(3):
        first = kept.current([weight], 1.0)
    weight.mul_(torch.rand(48, 64) < 0.3)
    second = kept.current([weight], 1.0)
    assert first is not None and second is not None and second.nnz < 0.5 * first.nnz


def test_packings_wait_for_a_pattern_that_will_not_settle() -> None:
    kept = Packings("identity", identity, Format.CSR)
    weight = pruned(48, 64)
    assert kept.current([weight], 1.0) is not None
    for _ in range(4):
        weight.copy_(pruned(48, 64))
        assert kept.current([weight], 1.0) is None
    settled = kept.current([weight], 1.0)
    assert settled is not None and settled.matches(weight)


def test_packings_of_new_values_at_every_call_wait_if_gathering_does_not_pay() -> None:
    kept = Packings("identity", identity, Format.CSR)
    weight = pruned(48, 64)
    sparse = []
    for _ in range(6):
        sparse.append(kept.current([weight], 1.0, renew=False) is not None)
        weight.mul_(2)
    assert sparse == [True, True, True, False, False, False]
    kept.current([weight], 1.0, renew=False)
    settled = kept.current([weight], 1.0, renew=False)
    assert settled is not None and settled.matches(weight)
    for _ in range(6):
        assert kept.current([weight], 1.0, renew=False) is settled
        assert kept.current([weight], 1.0, renew=False) is settled
        weight.mul_(2)  # gathered once, used twice


def test_packings_leave_a_dense_weight_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Packings("identity", identity, Format.CSR)
    weight = torch.randn(48, 64)
    assert kept.current([weight], 0.5) is None
    monkeypatch.setattr(lost_zeros, "_times", lost_zeros._MOST_TIMES)  # what other tests ran densely does not count
    monkeypatch.setattr(packed_weights, "run", None)  # no more evaluation while it changes at every call
    for _ in range(3):
        weight.add_(1)
        assert kept.current([weight], 0.5) is None
