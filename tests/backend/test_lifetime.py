"""Nothing stays of a graph that is gone: no region, no kernel, no packed weight, no edge list."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx, nn

import gossamer
from gossamer.backend.regions import compiled_kernel
from gossamer.backend.run import computed, lifetime, packed_weights, region_op
from gossamer.dialects.format import Format
from gossamer.runtime.packing import Packed
from gossamer.sparsity.attention.mask import everything
from tests.backend.harness import assert_same, compile_and_run, prune_, pruned

_TABLES = {
    "regions": region_op._regions, "computed": computed._table,
    "packings": packed_weights._known, "kernels": compiled_kernel._kernels,
}  # fmt: skip


_OTHERS = dict[int, Packed]()
"""Packed weights that an earlier test or a library has kept, by their ids."""


@pytest.fixture(autouse=True)
def nothing_before() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    lifetime._forever.clear()
    _OTHERS.update((id(each), each) for each in gc.get_objects() if isinstance(each, Packed))
    yield
    _OTHERS.clear()
    assert not lifetime._forever


def known() -> dict[str, int]:
    """What is in the tables, and the weights that are packed."""
    gc.collect()
    found = {name: len(table) for name, table in _TABLES.items()}
    return found | {"packed": sum(isinstance(each, Packed) and id(each) not in _OTHERS for each in gc.get_objects())}


def linear(m: int = 48) -> nn.Module:
    return prune_(nn.Sequential(nn.Linear(64, m), nn.ReLU()))


def two_linear(m: int = 48) -> nn.Module:
    return prune_(nn.Sequential(nn.Linear(64, m), nn.LayerNorm(m), nn.GELU(), nn.Linear(m, 64)))


class Mean(nn.Module):
    """Of the neighbours."""

    def __init__(self, m: int = 48) -> None:
        super().__init__()
        self.layer = nn.Linear(64, m)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(edges.shape[1])).clamp(min=1)
        summed = torch.zeros(len(x), 64).index_add(0, target, x[source])
        return self.layer(summed / degree[:, None])


def given(model: nn.Module) -> tuple[Tensor, ...]:
    return (torch.randn(20, 64), torch.randint(0, 20, (2, 90))) if isinstance(model, Mean) else (torch.randn(20, 64),)


@pytest.mark.parametrize(
    ("make", "grad", "dense"),
    [(two_linear, True, "inductor"), (Mean, False, "eager")],
)
def test_models_that_are_gone_leave_nothing(make: Callable[[int], nn.Module], grad: bool, dense: str) -> None:
    before = known()
    for m in (48, 40):
        model = make(m)
        x = given(model)
        run = compile_and_run(model, *x, dense=dense, grad=grad)
        assert run.regions
        assert_same(run.output.detach(), model(*x).detach())
        if grad:
            run.output.square().sum().backward()
        assert known() != before
        del model, x, run
        assert known()["packed"] == 0
        torch._dynamo.reset()  # what Dynamo has compiled would run another such model
        assert known() == before


def test_a_reset_lets_go_and_what_is_compiled_then_works() -> None:
    before, model, x = known(), two_linear(), torch.randn(20, 64)
    for _ in range(2):
        run = compile_and_run(model, x, grad=True)
        assert run.regions
        assert_same(run.output.detach(), model(x).detach())
        del run
        assert known() != before
        torch._dynamo.reset()
        assert known() == before


@pytest.mark.parametrize(("make", "dense"), [(linear, "inductor"), (Mean, "eager")])
def test_a_gradient_may_be_asked_for_when_its_model_is_gone(make: Callable[[], nn.Module], dense: str) -> None:
    before, model = known(), make()
    x, *edges = given(model)
    expected = torch.autograd.grad(model(x.requires_grad_(), *edges).square().sum(), x)[0]
    y = compile_and_run(model, x, *edges, dense=dense, grad=True).output
    del model
    torch._dynamo.reset()
    assert known() != before
    assert_same(torch.autograd.grad(y.square().sum(), x)[0], expected)
    del y
    assert known() == before


def test_models_of_the_same_code_share_what_is_compiled_and_leave_their_weights() -> None:
    x, found = torch.randn(20, 64), []
    for _ in range(3):
        model = linear()
        with torch.no_grad():
            assert_same(torch.compile(model, backend="sparse", options={"min_gain": 0, "dense": "eager"})(x), model(x))
        del model
        found.append(known())
    assert found == [found[0]] * 3 and found[0]["packed"] == 0


def test_graphs_share_what_they_call() -> None:
    """A region of equal content is one, and its weight is packed once, however many graphs call it."""
    model, x = linear(), torch.randn(20, 64)
    compile_and_run(lambda x: model(x), x)
    found = known()
    compile_and_run(lambda x: model(2 * x), x)
    assert known() == found
    run = compile_and_run(lambda x: model(x) + 1, x)
    another = {name: found[name] + 1 for name in ("regions", "kernels")}  # with the addition fused, and the same weight
    assert len(run.regions) == 1 and known() == found | another
    with torch.no_grad():
        assert_same(run.output, model(x) + 1)


def test_a_packing_goes_with_its_weight_without_the_collector() -> None:
    kept = packed_weights.Packings("identity", lambda weight: weight, Format.CSR)
    weight = pruned(48, 64)
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(kept.current([weight], 1.0))
        del weight
        assert len(kept) == 0 and alive() is None
        weight = pruned(48, 64)
        alive = weakref.ref(kept.current([weight], 1.0))
        del kept
        assert alive() is None, "what nobody looks up goes, too"
    finally:
        gc.enable()


def test_a_copy_of_a_compiled_model_runs() -> None:
    model, x = linear(), torch.randn(20, 64)
    run = compile_and_run(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again = torch.compile(other, backend="sparse", options={"dense": "eager", "min_gain": 0})
        with torch.no_grad():
            assert_same(again(x), run.function(x))


def test_a_graph_without_its_owner_says_so() -> None:
    known = set(region_op._regions)  # of other tests, as long as something keeps them
    model, x = linear(52), torch.randn(23, 64)
    run = compile_and_run(model, x)
    (key,) = set(region_op._regions) - known
    operands = [x, model[0].weight.detach(), model[0].bias.detach()]
    region_op.region(operands, key)
    del run
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(Exception, match=f"region {key} was compiled by another process"):
        region_op.region(operands, key)


def test_an_exported_program_that_is_gone_leaves_nothing() -> None:
    program = gossamer.export(two_linear().eval(), (torch.randn(20, 64),), options={"min_gain": 0})
    assert known()["packed"] > 0
    del program
    assert known()["packed"] == 0


def test_the_same_leaves_keep_a_few_structures_whatever_sizes_come() -> None:
    leaf, computed_ = torch.arange(4), computed.Computed(fx.GraphModule(nn.Module(), fx.Graph()), "uncounted")
    made = [computed_.remembered([leaf], (size,), nn.Identity) for size in range(40)]
    assert computed_.remembered([leaf], (39,), nn.Identity) is made[-1]
    assert computed_.remembered([leaf], (0,), nn.Identity) is not made[0]


def test_attention_without_a_mask_keeps_a_few_tables_whatever_numbers_of_queries_come() -> None:
    mask, keys = everything(64), torch.empty(1, 1, 64, 8)
    made = [mask.table(keys[:, :, :queries], keys) for queries in range(1, 41)]
    assert mask.table(keys[:, :, :40], keys) is made[-1]
    assert mask.table(keys[:, :, :1], keys) is not made[0]
