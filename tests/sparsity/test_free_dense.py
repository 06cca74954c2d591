"""prepare(free_dense=True): a compiled model holds its pruned weights packed only, and still is the model it was."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import gossamer
from gossamer.runtime.weight_store import dense_weight
from gossamer.sparsity.packed_linear import PackedLinear

EAGER = {"dense": "eager", "min_gain": 0, "strict": True}
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def pruned(density: float = 0.1, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(96, 80), nn.GELU(), nn.Linear(80, 64)).eval().to(dtype)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight[torch.rand(layer.weight.shape) >= density] = 0
    return model


def compiled(model: nn.Module, x: Tensor, **options: object) -> nn.Module:
    with torch.no_grad():
        function = torch.compile(model, backend="sparse", fullgraph=True, options={**EAGER, **options})
        function(x)
    return function


def kept(model: nn.Module) -> list[str]:
    """How the model keeps each of its pruned weights."""
    layers = [layer for layer in model.modules() if isinstance(layer, PackedLinear)]
    return ["dense" if layer._store.packed is None else "packed" for layer in layers]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_the_dense_weight_is_gone_once_it_is_packed(dense: str) -> None:
    model, x = pruned(), torch.randn(24, 96)
    expected = model(x).detach()
    storages = [weakref.ref(model[i].weight.untyped_storage()) for i in (0, 2)]
    assert gossamer.prepare(model, free_dense=True) is model
    gc.collect()
    assert kept(model) == ["dense", "dense"] and all(storage() is not None for storage in storages)
    function = compiled(model, x, dense=dense)
    gc.collect()
    assert kept(model) == ["packed", "packed"] and all(storage() is None for storage in storages)
    with torch.no_grad():
        assert_same(function(x), expected)
        assert torch.equal(model(x), expected), "without torch.compile"
    packed = model[0]._store.packed
    assert packed.nbytes + packed.pattern.nbytes < 0.25 * 4 * 96 * 80 and packed.source_or_none is None


def test_every_layer_is_still_a_region() -> None:
    model, x = gossamer.prepare(pruned(), free_dense=True), torch.randn(24, 96)
    for _ in range(2):  # the second time there is no dense weight to begin with
        with torch.no_grad():
            report = gossamer.explain(model, x, options=EAGER)
        assert [(d.name, d.sparse, round(d.density, 1)) for d in report.decisions] == [
            ("0.weight", True, 0.1),
            ("2.weight", True, 0.1),
        ]
        assert report.graph_breaks == [] and kept(model) == ["packed", "packed"]


def test_the_state_dict_is_that_of_the_unprepared_model() -> None:
    model, x = pruned(), torch.randn(24, 96)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compiled(gossamer.prepare(model, free_dense=True), x)
    after = model.state_dict()
    assert sorted(after) == sorted(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert kept(model) == ["packed", "packed"]
    other = nn.Sequential(nn.Linear(96, 80), nn.GELU(), nn.Linear(80, 64))
    other.load_state_dict(after)
    after["0.weight"].zero_()
    assert torch.equal(model.state_dict()["0.weight"], before["0.weight"])


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_is_loaded_and_packed_again(assign: bool) -> None:
    model, x, other = gossamer.prepare(pruned(), free_dense=True), torch.randn(24, 96), pruned(0.2)
    function = compiled(model, x)
    model.load_state_dict(other.state_dict(), assign=assign)
    assert kept(model) == ["dense", "dense"]
    with torch.no_grad():
        for _ in range(3):
            assert_same(function(x), other(x))
    assert kept(model) == ["packed", "packed"] and torch.equal(model[0].weight, other[0].weight)


def test_a_checkpoint_that_does_not_fit_is_refused_as_ever() -> None:
    model = gossamer.prepare(pruned(), free_dense=True)
    compiled(model, torch.randn(24, 96))
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({**model.state_dict(), "0.weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.weight"'):
        model.load_state_dict({name: value for name, value in model.state_dict().items() if name != "0.weight"})
    model.load_state_dict({"0.bias": torch.zeros(80)}, strict=False)
    assert kept(model)[0] == "packed", "its weight was never loaded"


def test_a_weight_can_be_assigned() -> None:
    model, x, other = gossamer.prepare(pruned(), free_dense=True), torch.randn(24, 96), pruned()
    function = compiled(model, x)
    model[0].weight, model[2].weight = other[0].weight, other[2].weight.detach()
    model[0].bias, model[2].bias = other[0].bias, other[2].bias
    with torch.no_grad():
        assert_same(function(x), other(x))
    with pytest.raises(gossamer.GossamerError, match=r"shape \(80, 96\) cannot become one of shape \(3, 3\)"):
        model[0].weight = torch.zeros(3, 3)


def test_a_weight_that_becomes_dense_runs_dense() -> None:
    model, x = gossamer.prepare(pruned(), free_dense=True), torch.randn(256, 96)
    function = compiled(model, x)
    with torch.no_grad():
        model[0].weight = torch.randn(80, 96)
        for _ in range(3):
            assert_same(function(x), model(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_copies_hold_the_weight_and_compile_for_themselves(copied: object) -> None:
    model, x = gossamer.prepare(pruned(), free_dense=True), torch.randn(24, 96)
    compiled(model, x)
    twin = copied(model)  # type: ignore[operator]
    assert kept(twin) == ["dense", "dense"] and kept(model) == ["packed", "packed"]
    twin[0].weight = 2 * twin[0].weight
    function = compiled(twin, x)
    assert kept(twin) == ["packed", "packed"]
    with torch.no_grad():
        assert_same(function(x), twin(x))
        assert not torch.allclose(twin(x), model(x))


def test_it_is_saved_and_loaded_by_torch() -> None:
    model, x = gossamer.prepare(pruned(), free_dense=True), torch.randn(24, 96)
    compiled(model, x)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = gossamer.prepare(pruned(), free_dense=True)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        assert torch.equal(fresh(x), model(x))


def test_another_dtype_is_packed_anew() -> None:
    model, x = gossamer.prepare(pruned(), free_dense=True), torch.randn(24, 96)
    compiled(model, x)
    assert kept(model.float()) == ["packed", "packed"], "it was float32 already"
    model.double()
    assert model[0].weight.dtype == torch.float64 and kept(model) == ["dense", "dense"]
    function = compiled(model, x.double())
    assert kept(model) == ["packed", "packed"]
    with torch.no_grad():
        torch.testing.assert_close(function(x.double()), model(x.double()))


def test_bf16() -> None:
    model = gossamer.prepare(pruned(dtype=torch.bfloat16), free_dense=True)
    x = torch.randn(24, 96, dtype=torch.bfloat16)
    function = compiled(model, x)
    assert kept(model) == ["packed", "packed"]
    with torch.no_grad():
        torch.testing.assert_close(function(x), model(x), rtol=3e-2, atol=3e-2)


def test_few_tokens_and_many_share_one_weight() -> None:
    """Each number of tokens may want its own packing: it is made from what is kept."""
    model, x = gossamer.prepare(pruned(), free_dense=True), torch.randn(64, 96)
    function = torch.compile(model, backend="sparse", dynamic=True, fullgraph=True, options=EAGER)
    with torch.no_grad():
        for tokens in (64, 1, 2, 17, 64):
            assert_same(function(x[:tokens]), model(x[:tokens]))
            assert kept(model) == ["packed", "packed"]


def test_gradients_of_the_input_flow() -> None:
    """The backward reads the weight the other way round, from the same one."""
    model, x = pruned(), torch.randn(24, 96, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    gossamer.prepare(model, free_dense=True)
    function = torch.compile(model, backend="sparse", fullgraph=True, options=EAGER)
    (actual,) = torch.autograd.grad(function(x).square().sum(), x)
    assert_same(actual, expected)
    assert kept(model) == ["packed", "packed"]


def test_a_layer_that_stays_dense_keeps_its_weight() -> None:
    model, x = gossamer.prepare(pruned(), free_dense=True), torch.randn(24, 96)
    expected = model(x).detach()
    compiled(model, x)
    torch._dynamo.reset()
    function = compiled(model, x, min_gain=1e9)
    with torch.no_grad():
        assert_same(function(x), expected)
    assert kept(model) == ["dense", "dense"], "a graph reads them at every call"


def test_what_reads_a_weight_cannot_write_to_it() -> None:
    model, x = gossamer.prepare(pruned(), free_dense=True), torch.randn(24, 96)

    def halve(x: Tensor) -> Tensor:
        weight = model[0].weight
        weight.mul_(0.5)
        return x @ weight.t()

    expected = 0.5 * x @ model[0].weight.t()
    function = torch.compile(halve, backend="sparse", options={"min_gain": 1e9})
    with torch.no_grad():
        for _ in range(3):
            assert_same(function(x), expected)


def test_pruning_and_masks_are_multiplied_in() -> None:
    model, x = pruned(1.0), torch.randn(24, 96)
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", 0.9)
    expected = model(x).detach()
    function = compiled(gossamer.prepare(model, free_dense=True), x)
    assert kept(model) == ["packed", "packed"]
    assert sorted(model.state_dict()) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    with torch.no_grad():
        assert_same(function(x), expected)


def test_what_is_left_alone() -> None:
    dense, tied = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
    tied.weight.data[torch.rand(32, 32) < 0.9] = 0
    embedding = nn.Embedding(32, 32)
    embedding.weight = tied.weight
    own = type("Own", (nn.Linear,), {})(32, 32)
    own.weight.data.zero_()
    model = gossamer.prepare(nn.ModuleList([dense, tied, embedding, own]), free_dense=True)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_a_weight_dies_with_its_layer() -> None:
    model, x = gossamer.prepare(pruned(), free_dense=True), torch.randn(24, 96)
    function = compiled(model, x)
    dead, handle = weakref.ref(model[0]._store), torch.zeros(1)
    del model, function
    torch._dynamo.reset()
    gc.collect()
    assert dead() is None
    with pytest.raises(gossamer.GossamerError, match="of a module that is gone, or of another process"):
        dense_weight(handle, 80, 96)


def test_shared_memory() -> None:
    """It moves what stands for the weight."""
    model, x = gossamer.prepare(pruned(), free_dense=True), torch.randn(24, 96)
    function = compiled(model, x)
    expected = model(x).detach()
    model.share_memory()
    for _ in range(2):
        with torch.no_grad():
            assert_same(function(x), expected)
    assert kept(model) == ["packed", "packed"]
