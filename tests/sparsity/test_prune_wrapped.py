"""`gossamer.prune`, `quantize` and `distill`: models that are compiled, wrapped or pruned already, and chains that are none."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import gossamer
from gossamer.sparsity.pruning import calibrate
from gossamer.sparsity.quantization.quantized_linear import QuantizedLinear


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Dynamo gives up code that was compiled for too many models, that of torch's own modules, too."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def batches(count: int = 4) -> list[Tensor]:
    return list(torch.randn(count, 64, 32, generator=torch.Generator().manual_seed(0)))


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def by_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


def inner(model: nn.Module) -> nn.Module:
    model[2] = torch.compile(model[2], backend="eager")  # type: ignore[operator, index]
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),  # type: ignore[dict-item, return-value]
    "compiled in place": in_place,
    "compiled forward": by_forward,
    "a layer compiled": inner,
    "data parallel": nn.DataParallel,
    "both": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),  # type: ignore[arg-type]
}


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_compiled_or_wrapped_is_pruned_and_quantized_as_it_is(wrapper: str) -> None:
    plain, model = network(), network()
    wrapped = WRAPPERS[wrapper](model)
    with torch.no_grad():
        wrapped(batches()[0])
    attributes = {name: set(vars(module)) for name, module in wrapped.named_modules()}
    expected, report = gossamer.prune(plain, batches(), 0.5), gossamer.prune(wrapped, batches(), 0.5)
    assert [line.name for line in report.layers] == ["0", "2", "4"] == [line.name for line in expected.layers]
    assert not any(line.note for line in report.layers)
    assert_equal(model, plain)
    assert attributes == {name: set(vars(module)) for name, module in wrapped.named_modules()}
    gossamer.quantize(plain, batches(), only=["0", "2"])
    gossamer.quantize(wrapped, batches(), only=["0", "2"])
    with torch.no_grad():
        assert torch.equal(wrapped(batches()[0]), plain(batches()[0]))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_files_have_the_names_of_the_model_within(wrapper: str, tmp_path: Path) -> None:
    plain, wrapped = network(), WRAPPERS[wrapper](network())
    gossamer.prune(wrapped, batches(), 0.5)
    gossamer.quantize(wrapped, only="2")
    gossamer.save(wrapped, tmp_path / "wrapped.safetensors")
    gossamer.load(plain, tmp_path / "wrapped.safetensors")
    with torch.no_grad():
        expected = wrapped(batches()[0])
        assert torch.equal(plain(batches()[0]), expected)
        fresh = WRAPPERS[wrapper](network())
        gossamer.load(fresh, tmp_path / "wrapped.safetensors")
        assert torch.equal(fresh(batches()[0]), expected)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        if cache is not None:
            cache.append(y)
            return x + cache[0]
        return x + y


class Blocks(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(96 if way == "several outputs" else 32, 8)

    def forward(self, x: Tensor) -> Tensor:
        given, cache = [], list[Tensor]()
        for block in self.blocks:
            x = block(x, cache) if self.way == "a cache" else block(x)
            if self.way == "in place":
                x += 1
            given.append(x)
        y: Tensor = self.head(torch.cat(given, -1) if self.way == "several outputs" else x)
        return y


@pytest.mark.parametrize("way", ["several outputs", "in place", "a cache"])
def test_blocks_that_are_no_chain_are_pruned_as_the_model_calls_them(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, whole = Blocks(way), Blocks(way)
    gossamer.prune(model, batches(), 0.5)
    monkeypatch.setattr(calibrate, "chain_of_blocks", lambda *_: [])
    gossamer.prune(whole, batches(), 0.5)
    assert_equal(model, whole)


class Adds(nn.Module):
    """A block that changes its input in place, and two layers that get the same tensor with other values."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first, self.second, self.in_place = nn.Linear(32, 32), nn.Linear(32, 32), in_place

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            y = layer(x).relu()
            x = x.add_(y) if self.in_place else x + y
        return x


@pytest.mark.parametrize("chain", [False, True])
def test_blocks_that_change_their_inputs_in_place_are_pruned_like_others(chain: bool) -> None:
    models, data = [], batches(2)
    for in_place in (True, False):
        torch.manual_seed(0)
        blocks = [Adds(in_place) for _ in range(2 if chain else 1)]
        models.append(nn.Sequential(nn.Linear(32, 32), nn.Sequential(*blocks), nn.Linear(32, 4)) if chain else blocks[0])
    reports = [gossamer.prune(model, data, 0.5) for model in models]
    assert len(reports[0].layers) == (6 if chain else 2)
    assert [line.error for line in reports[0].layers] == pytest.approx([line.error for line in reports[1].layers], rel=1e-3)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(data, batches(2), strict=True))


def test_a_decoder_within_another_model_keeps_no_cache() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 64}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2)).eval()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(model)

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.inner(ids).logits
            return logits

    outer, ids = Outer(), torch.randint(0, 64, (3, 8, 7), generator=torch.Generator().manual_seed(0))
    gossamer.prune(model, [{"input_ids": each} for each in ids], 0.5)
    gossamer.prune(outer, list(ids), 0.5)
    assert_equal(outer.inner, model)


def test_a_forward_of_a_block_of_its_own_stays() -> None:
    model = Blocks("")
    forward, calls = model.blocks[1].forward, list[int]()

    def counted(*args: Any) -> Any:
        calls.append(1)
        return forward(*args)

    model.blocks[1].forward = counted  # type: ignore[method-assign]
    gossamer.prune(model, batches(), 0.5)
    assert model.blocks[1].forward is counted and calls and "forward" not in vars(model.blocks[0])


@pytest.mark.parametrize("calls", [2, 6, 9, 15, 21])
def test_a_model_that_was_broken_off_goes_on(calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = Blocks(""), Blocks("")
    report = gossamer.prune(expected, batches(), 0.5, budget="sensitivity")
    inputs_of, done = calibrate.inputs_of, 0

    def breaks(*args: Any) -> Any:
        nonlocal done
        done += 1
        if done > 14 + calls:  # behind those of the budget
            raise KeyboardInterrupt
        return inputs_of(*args)

    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "inputs_of", breaks)
        with pytest.raises(KeyboardInterrupt):
            gossamer.prune(model, batches(), 0.5, budget="sensitivity", resume=tmp_path)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    again = gossamer.prune(model, batches(), 0.5, budget="sensitivity", resume=tmp_path)
    assert_equal(model, expected)
    assert sorted(line.name for line in again.layers) == sorted(line.name for line in report.layers)


def test_a_stage_that_ends_in_nan_leaves_the_model_as_it_was() -> None:
    class Overflows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 0

    model = nn.Sequential(nn.Linear(32, 16), Overflows(), nn.Linear(16, 4))
    before = copy.deepcopy(model)
    with pytest.raises(gossamer.OptionError, match="'2' inputs with NaN"):
        gossamer.prune(model, batches(), 0.5)
    assert_equal(model, before)


def test_what_is_kept_of_a_run_is_checked(tmp_path: Path) -> None:
    model = network()
    gossamer.prune(model, batches(), 0.5, resume=tmp_path / "run")
    other = network()
    with torch.no_grad():
        other[0].weight.mul_(2)
    before = copy.deepcopy(other)
    with pytest.raises(gossamer.OptionError, match="another model, whose '0'"):
        gossamer.prune(other, batches(), 0.5, resume=tmp_path / "run")
    assert_equal(other, before)
    stage = next((tmp_path / "run").glob("stage-*.pt"))
    whole = stage.read_bytes()
    for content in (whole[:-50], b"", b"no"):
        stage.write_bytes(content)
        with pytest.raises(gossamer.OptionError, match=r"stage-0000\.pt is broken"):
            gossamer.prune(network(), batches(), 0.5, resume=tmp_path / "run")
    with pytest.raises(gossamer.OptionError, match="which is a file"):
        gossamer.prune(network(), batches(), 0.5, resume=stage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("method", ["best", "admm", "sparsegpt", "wanda", "magnitude"])
def test_inputs_that_never_change_can_be_pruned_for(method: str, dtype: torch.dtype) -> None:
    model, dense = network().to(dtype), network().to(dtype)
    x = 100 * torch.ones(64, 32, dtype=dtype)
    report = gossamer.prune(model, [x, x], 0.5, method=method, damping=0)
    assert report.sparsity == pytest.approx(0.5, abs=0.01)
    with torch.no_grad():
        assert ((model(x) - dense(x)).norm() <= 0.05 * dense(x).norm()).item()  # biases make up for it


def test_nothing_is_pruned_for_no_samples_and_nothing_of_layers_without_elements() -> None:
    model, before = network(), network()
    assert all("do not reach" in line.note for line in gossamer.prune(model, [torch.empty(0, 32)], 0.5).layers)
    assert_equal(model, before)
    model = nn.Sequential(nn.Linear(32, 0), nn.Linear(0, 8), nn.Linear(8, 8))
    assert [line.name for line in gossamer.prune(model, batches(), 0.5).layers] == ["2"]


def test_padded_batches_of_torchs_encoder() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 4)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            y: Tensor = self.head(self.encoder(x, src_key_padding_mask=padding))
            return y

    model, padding = Padded(), torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    report = gossamer.prune(model, [(torch.randn(2, 7, 32), padding)] * 2, 0.5)
    assert model.encoder.use_nested_tensor
    assert len(report.layers) == 13 and not any(line.note for line in report.layers)


def hooked(model: nn.Module) -> nn.Module:
    for layer in (model[0], model[2], model[4]):  # type: ignore[index]
        prune.l1_unstructured(layer, "weight", 0.5)
    return model


def test_layers_under_hooks_of_torch_are_layers(tmp_path: Path) -> None:
    x = batches()[0]
    quantized = gossamer.quantize(hooked(network()))
    assert all(isinstance(quantized[i], QuantizedLinear) and not quantized[i]._forward_pre_hooks for i in (0, 2, 4))
    assert torch.equal(quantized(x), gossamer.quantize(gossamer.finalize(hooked(network())))(x))
    twice = gossamer.sparsify(hooked(network()), "magnitude", density=0.1)
    assert all(twice[i].weight.count_nonzero() <= 0.1 * twice[i].weight.numel() + 1 for i in (0, 2, 4))
    loss = gossamer.DistillationLoss(logits=1)
    calls: list[Callable[[nn.Module], object]] = [
        lambda model: gossamer.prune(model, batches(), 0.8),
        lambda model: gossamer.distill(model, network(), batches(), loss, steps=1),
        lambda model: gossamer.save(model, tmp_path / "x.safetensors"),
    ]
    for call in calls:
        with pytest.raises(gossamer.OptionError, match=r"'0' has a mask: gossamer\.finalize"):
            call(hooked(network()))


def test_messages_say_what_a_layer_is() -> None:
    model = network()
    parametrizations.weight_norm(model[0])
    with pytest.raises(gossamer.OptionError, match="'0' is computed from others"):
        gossamer.prune(model, batches(), 0.5)
    quantized = gossamer.quantize(network(), only="*")
    with pytest.raises(gossamer.OptionError, match="the weight of a QuantizedLinear is not a parameter"):
        gossamer.prune(quantized, batches(), 0.5)
    with pytest.raises(gossamer.OptionError, match=r"'0' \(that is a QuantizedLinear"):
        gossamer.quantize(quantized, only="0")
    for data in (None, 3):
        with pytest.raises(gossamer.OptionError, match="must be batches"):
            gossamer.prune(network(), data, 0.5)  # type: ignore[arg-type]


def test_batches_of_inference_mode() -> None:
    with torch.inference_mode():
        data = batches()
    model, teacher = network(), network()
    gossamer.prune(model, data, 0.5)
    gossamer.distill(model, teacher, data, gossamer.DistillationLoss(logits=1), steps=2)
    with torch.inference_mode():
        gossamer.distill(model, teacher, data, gossamer.DistillationLoss(logits=1), steps=2)
        gossamer.quantize(model, data)
    assert model[0].input_scale is not None and not model[0].weight_int8.is_inference()


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "prune": lambda model: gossamer.prune(model, batches(), 0.5),
    "sensitivity": lambda model: gossamer.prune(model, batches(), 0.5, budget="sensitivity"),
    "not sequential": lambda model: gossamer.prune(model, batches(), 0.5, sequential=False),
    "decompose": lambda model: gossamer.decompose(model, batches(), 0.5),
    "sparsify": lambda model: gossamer.sparsify(model, "magnitude", density=0.5),
    "finalize": lambda model: gossamer.finalize(gossamer.sparsify(model, "magnitude", density=0.5)),
    "store_sparse": lambda model: gossamer.store_sparse(gossamer.sparsify(model, "magnitude", density=0.5)),
}


@pytest.mark.parametrize("way", CHANGES)
def test_a_model_that_was_changed_in_inference_mode_trains(way: str) -> None:
    model = network()
    with torch.inference_mode():
        CHANGES[way](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batches()[0]).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("way", ["prune", "sensitivity", "not sequential"])
def test_prune_writes_to_the_memory_of_the_weights(way: str) -> None:
    model = network()
    state = model.state_dict()
    CHANGES[way](model)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.count_nonzero(state["2.weight"]) < 64 * 64


@pytest.mark.parametrize(
    "computed", [prune.identity, lambda layer, name: parametrize.register_parametrization(layer, name, nn.Identity())]
)
def test_a_bias_that_is_computed_stays_and_the_weights_allow_for_it(computed: Callable[[nn.Module, str], object]) -> None:
    model, twin, data = network(), network(), [x + 3 for x in batches()]  # with a mean, for which biases could make up
    for layer in (twin[0], twin[2], twin[4]):
        layer.bias = None
    for layer in (model[0], model[2], model[4]):
        with torch.no_grad():
            layer.bias.zero_()
        computed(layer, "bias")
    for each in (model, twin):
        gossamer.prune(each, data, 0.5)
    torch.testing.assert_close(model(data[0]), twin(data[0]))
