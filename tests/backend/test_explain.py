"""What `gossamer.explain` reports, and that it leaves nothing behind."""

import copy
import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import gossamer
from gossamer import Report
from tests.backend.harness import prune_, pruned

EAGER = {"dense": "eager", "min_gain": 0}
DEFAULT = {"dense": "eager"}


class Layer(nn.Module):
    """A sparse layer, and with `broken` a line that breaks the graph."""

    def __init__(self, *after: nn.Module, size: int = 64, broken: bool = False) -> None:
        super().__init__()
        self.fc, self.after, self.broken = nn.Linear(size, size), nn.Sequential(*after), broken
        prune_(self.fc)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        if self.broken:
            print(end="")
        return self.after(x)


both = pytest.mark.parametrize("broken", [False, True])


def explained(model: Any, *inputs: Any, options: dict[str, Any] = EAGER, sparse: int = 1, **kwargs: Any) -> Report:
    report = gossamer.explain(model, *inputs, options=options, **kwargs)
    assert sum(report.layers.values()) == sparse, str(report)
    return report


# Nothing is left behind


@both
def test_batch_statistics_stay(broken: bool) -> None:
    model = Layer(nn.BatchNorm1d(64), broken=broken)
    before = copy.deepcopy(model.state_dict())
    report = explained(model, torch.randn(8, 64))
    assert len(report.graph_breaks) == broken
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@both
@pytest.mark.parametrize("normed", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.*is deprecated")
def test_the_vectors_of_a_spectral_norm_stay(normed: Any, broken: bool) -> None:
    model = Layer(normed(nn.Linear(64, 64)), broken=broken)
    before = copy.deepcopy(model.state_dict())
    explained(model, torch.randn(8, 64), sparse=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@both
def test_random_numbers_stay(broken: bool) -> None:
    class Random(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(x)) * random.random() + float(np.random.rand())

    model, x = Random(broken=broken), torch.randn(8, 64)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    gossamer.explain(model, x, options=EAGER)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1] and np.random.get_state()[1].tolist() == before[2]


def test_counters_stay() -> None:
    from torch._dynamo.utils import counters

    counters["gossamer"]["regions"] = 7
    before = {name: dict(counts) for name, counts in counters.items()}
    explained(Layer(broken=True), torch.randn(8, 64))
    assert {name: dict(counts) for name, counts in counters.items() if counts} == {n: c for n, c in before.items() if c}


@both
def test_a_cache_of_keys_and_values_stays(broken: bool) -> None:
    from transformers import DynamicCache

    class Decoder(Layer):
        def forward(self, x: Tensor, past: Any) -> Tensor:
            key, value = past.update(x[:, None], x[:, None], 0)
            return super().forward(x) + key.sum() + value.sum()

    cache = DynamicCache()
    cache.update(torch.randn(1, 1, 8, 64), torch.randn(1, 1, 8, 64), 0)
    before = cache.layers[0].keys.clone()
    explained(Decoder(broken=broken), torch.randn(1, 1, 64), past=cache)
    assert cache.get_seq_length() == 8 and torch.equal(cache.layers[0].keys, before)


@both
def test_inputs_stay(broken: bool) -> None:
    class Writing(Layer):
        def forward(self, x: Tensor, *more: Any) -> Tensor:
            x.mul_(2)
            more[0]["x"].add_(1)
            more[0]["new"] = x
            more[1].append(1)
            return super().forward(x) + more[0]["x"]

    x, inside, found = torch.randn(8, 64), {"x": torch.zeros(64)}, []
    before = x.clone()
    explained(Writing(broken=broken), x, inside, found)
    assert torch.equal(x, before) and list(inside) == ["x"] and not inside["x"].any() and found == []


@both
def test_an_expanded_input_and_one_of_inference_mode_stay(broken: bool) -> None:
    class Writing(Layer):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y.mul_(2)
            return super().forward(x + y)

    with torch.inference_mode():
        y = torch.ones(8, 64)
        explained(Writing(broken=broken), torch.ones(1, 64).expand(8, 64), y)
    assert (y == 1).all()


@both
def test_attributes_stay(broken: bool) -> None:
    class Stateful(Layer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.calls, self.seen = 0, [torch.zeros(2)]

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(x)
            self.aux = x.mean()
            return super().forward(x)

    model = Stateful(broken=broken)
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    of_weight = dict(vars(model.fc.weight))
    explained(model, torch.randn(8, 64, requires_grad=True))
    assert model.calls == 0 and len(model.seen) == 1 and not hasattr(model, "aux")
    assert {name: list(vars(module)) for name, module in model.named_modules()} == {n: list(a) for n, a in attributes.items()}
    assert vars(model.fc.weight) == of_weight
    copy.deepcopy(model)  # which torch refuses where an attribute has a gradient


def test_parameters_that_uncompiled_code_writes_to_stay() -> None:
    class Clamped(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.clamp()
            return y

        @torch._dynamo.disable
        def clamp(self) -> None:
            self.fc.weight.data.clamp_(-1e-3, 1e-3)
            self.fc.bias.data = torch.zeros(64)

    model = Clamped()
    before = copy.deepcopy(model.state_dict())
    explained(model, torch.randn(8, 64))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_captured_and_global_tensors_stay() -> None:
    model, captured, count = Layer(broken=True), torch.zeros(64), 0

    def function(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        captured.add_(1)
        return model(x) + captured + GLOBAL.add_(1)

    explained(function, torch.randn(8, 64))
    assert count == 0 and not captured.any() and not GLOBAL.any()


GLOBAL = torch.zeros(64)


def test_a_step_of_training_is_explained_without_being_made() -> None:
    model = Layer()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(8, 64)
    step(x)
    model.fc.bias.grad = None
    before, gradient = copy.deepcopy((model.state_dict(), optimizer.state_dict())), model.fc.weight.grad.clone()
    assert explained(step, x).training
    state = model.state_dict(), optimizer.state_dict()
    for now, was in zip(state, before, strict=True):
        torch.testing.assert_close(now, was, rtol=0, atol=0)
    assert torch.equal(model.fc.weight.grad, gradient) and model.fc.bias.grad is None


@both
def test_stored_nonzeros_stay(broken: bool) -> None:
    model = gossamer.store_sparse(Layer(nn.BatchNorm1d(64), broken=broken))
    before = copy.deepcopy(model.state_dict())
    explained(model, torch.randn(8, 64))
    for name, value in model.state_dict().items():
        was = before[name]
        same = value.to_dense() == was.to_dense() if isinstance(value, gossamer.SparseTensor) else value == was
        assert same.all()


def test_a_model_in_one_graph_is_not_run() -> None:
    ran = []

    class Hooked(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            torch._dynamo.graph_break() if self.broken else None
            ran.append(len(ran))
            return y

    explained(Hooked(), torch.randn(8, 64))
    assert ran == []
    linear = prune_(nn.Linear(64, 64))  # torch puts a frame of its own around modules of torch
    linear.register_forward_hook(lambda *_: COUNTED.append(1))
    explained(linear, torch.randn(8, 64))
    assert COUNTED == []


COUNTED = list[int]()


def test_a_part_in_one_graph_does_not_end_the_call() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.compile(prune_(nn.Linear(64, 64)), backend="sparse", options=EAGER)
            self.two = Layer()

        def forward(self, x: Tensor) -> Tensor:
            for part in (self.one, self.two):
                with torch.autograd.profiler.record_function(str(id(x))):
                    torch._dynamo.graph_break()
                    x = part(x)
            return x

    assert set(explained(Parts(), torch.randn(8, 64), sparse=2).layers) == {"one.weight", "two.fc.weight"}


@both
def test_nothing_keeps_a_model_alive(broken: bool) -> None:
    model = Layer(broken=broken)
    explained(model, torch.randn(8, 64))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_model_that_fails_is_put_back_too() -> None:
    class Failing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = 1
            super().forward(x)
            raise KeyError("here")

    model = Failing(broken=True)
    with pytest.raises(KeyError, match="here"):
        gossamer.explain(model, torch.randn(8, 64), options=EAGER)
    assert not hasattr(model, "calls")


# Both modes


def trained() -> nn.Module:
    """A stack that is sparse in inference, and too costly to gather at every step of training."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(3))
    return prune_(nn.Sequential(*layers), 0.1)


@pytest.fixture
def costly_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.backend.regions.decide.renewing_pays", lambda *_: False)
    monkeypatch.setattr("gossamer.backend.regions.decide.predicted_gain", lambda *_: 3.0)


@pytest.mark.usefixtures("costly_gathering")
def test_the_report_says_which_mode_it_is_about_and_what_the_other_gives() -> None:
    model, x = trained().train(), torch.randn(8, 1024)
    report = gossamer.explain(model, x, options=DEFAULT)
    assert report.training and report.other is not None and not report.other.training
    assert list(report.layers.values()) == [False] * 3 and list(report.other.layers.values()) == [True] * 3
    first, second, *_ = str(report).splitlines()
    assert first == "gossamer, training: 0 sparse on 0 kernels, 3 left dense"
    assert second.startswith("In inference") and ": 3 sparse on " in second and second.endswith(", 0 left dense")
    assert "store_sparse" in str(report) and "store_sparse" not in str(report.other)
    assert model.training and all(module.training for module in model.modules())


@pytest.mark.usefixtures("costly_gathering")
def test_without_gradients_only_inference_is_looked_at() -> None:
    model, x = trained().eval(), torch.randn(8, 1024)
    with torch.no_grad():
        report = gossamer.explain(model, x, options=DEFAULT)
    assert not report.training and report.other is None
    assert str(report).startswith("gossamer, inference: 3 sparse on ")
    assert "In training" not in str(report)
    assert gossamer.explain(model.requires_grad_(False), x, options=DEFAULT).other is None


@pytest.mark.usefixtures("costly_gathering")
def test_the_inference_of_a_model_in_eval_mode_is_in_the_report_whatever_the_grad_mode() -> None:
    model, x = trained().eval(), torch.randn(8, 1024)
    report = gossamer.explain(model, x, options=DEFAULT)
    inference = report.other if report.training else report
    assert inference is not None and list(inference.layers.values()) == [True] * 3
    report = gossamer.explain(model, x, options=DEFAULT, both=True)
    assert report.other is not None and report.training != report.other.training
    assert not any(module.training for module in model.modules())


def test_the_other_mode_is_left_out_on_request() -> None:
    report = explained(Layer(), torch.randn(8, 64), both=False)
    assert report.other is None and "\nIn " not in str(report)


def test_a_model_that_fails_in_the_other_mode_is_reported_in_its_own() -> None:
    class Strict(Layer):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                raise ValueError("train me")
            return super().forward(x)

    assert explained(Strict(), torch.randn(8, 64)).other is None


# Layers, weights without zeros, patterns, schedules


def test_layers_are_counted_and_not_their_uses() -> None:
    class Twice(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.relu(self.fc(x)))

    report = explained(Twice(), torch.randn(8, 64, requires_grad=True))
    assert len(report.decisions) > 2 and report.layers == {"fc.weight": True}
    assert str(report).startswith("gossamer, training: 1 sparse on ") and ", 0 left dense" in str(report)


def test_weights_without_zeros_are_listed() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Embedding(50, 32), nn.Linear(2, 2))
    report = gossamer.explain(lambda x: model[0](x) + model[1].weight.sum() + model[2].weight.sum(), torch.randn(4, 64))
    assert report.layers == {"model.0.weight": False, "model.1.weight": False}
    assert {decision.reason for decision in report.decisions} == {"it has no zeros"}
    assert "2 left dense" in str(report) and "The model is not pruned. Prune it first" in str(report)


def test_a_model_that_a_merge_has_filled_is_not_passed_over() -> None:
    """As of LoRA's adapters, whose product has no zeros."""
    model = Layer()
    with torch.no_grad():
        model.fc.weight += torch.randn(64, 4) @ torch.randn(4, 64)
    report = explained(model, torch.randn(8, 64), options=DEFAULT, sparse=0)
    assert report.layers == {"fc.weight": False} and "it has no zeros" in str(report)


def test_one_pruned_layer_beside_one_that_is_not() -> None:
    model = Layer(nn.Linear(64, 64), size=64)
    report = gossamer.explain(model, torch.randn(8, 64), options=DEFAULT)
    assert set(report.layers) == {"fc.weight", "after.0.weight"} and "not pruned" not in str(report)


def test_a_function_of_nothing_that_could_be_sparse_is_said_to_be_one() -> None:
    assert "has traced no weight matrix" in str(gossamer.explain(lambda x: x + 1, torch.randn(4), options=EAGER))
    assert "has traced no weight matrix" in str(gossamer.explain(lambda: 1, options=EAGER))


def groups(n: int, m: int, *shape: int) -> Tensor:
    """Values of which n of every m neighbours in a row are not zero, any of them."""
    order = torch.rand(*shape).unflatten(-1, (-1, m)).argsort(-1).flatten(-2)
    return torch.randn(*shape) * (order < n)


@torch.no_grad()
def test_two_of_four_is_named() -> None:
    model, x = nn.Linear(256, 256), torch.randn(4, 256)
    model.weight.copy_(groups(2, 4, 256, 256))
    report = explained(model, x)
    assert report.decisions[0].pattern == "2:4" and "2:4" in str(report) and "nonzero in 2:4" in str(report.decisions[0])
    model.weight.copy_(pruned(256, 256))
    assert explained(model, x).decisions[0].pattern == ""
    model.weight.copy_(pruned(16, 16, density=0.3).sign().abs().repeat_interleave(16, 0).repeat_interleave(16, 1))
    assert explained(model, x).decisions[0].pattern == "blocks of 16x16"


@torch.no_grad()
@pytest.mark.parametrize("schedule", ["kblock", "gather", "bitmap"])
def test_schedules_are_named_as_the_option_takes_them(schedule: str) -> None:
    report = explained(Layer(), torch.randn(8, 64), options={**EAGER, "schedule": schedule})
    assert f"sparse ({schedule})," in str(report)


# Names


def layer_names(model: Any, *inputs: Any, **kwargs: Any) -> set[str]:
    return set(gossamer.explain(model, *inputs, options=EAGER, **kwargs).layers)


@torch.no_grad()
def test_a_weight_is_named_by_its_path_whatever_self_is_called() -> None:
    class Odd(nn.Module):
        def __init__(this) -> None:
            super().__init__()
            this.inner = Layer()

        def forward(s, x: Tensor) -> Tensor:
            return s.inner(x)

    model, x = Odd(), torch.randn(8, 64)
    assert layer_names(model, x) == {"inner.fc.weight"}
    model.inner.broken = True
    assert layer_names(model, x) == {"inner.fc.weight"}
    assert layer_names(lambda y: model(y), x) == {"model.inner.fc.weight"}


@torch.no_grad()
def test_a_wrapper_around_forward_is_no_part_of_a_name() -> None:
    def wrapped(forward: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        return wrapper

    class Wrapped(Layer):
        forward = wrapped(Layer.forward)

    assert layer_names(Wrapped(), torch.randn(8, 64)) == {"fc.weight"}
    model = Layer()
    model.forward = wrapped(model.forward)  # type: ignore[method-assign]
    assert layer_names(model, torch.randn(8, 64)) == {"fc.weight"}


@torch.no_grad()
def test_modules_beside_the_registered_ones_have_plain_names() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.__dict__["base"] = Layer(nn.Linear(64, 64))
            prune_(self.__dict__["base"])

        def forward(self, x: Tensor) -> Tensor:
            return self.__dict__["base"](x)

    assert layer_names(Outer(), torch.randn(8, 64)) == {"base.fc.weight", "base.after.0.weight"}


@torch.no_grad()
def test_what_torch_compile_wraps_has_the_name_of_the_module() -> None:
    model = nn.Sequential(Layer())
    model[0] = torch.compile(model[0], backend="eager")
    assert layer_names(model, torch.randn(8, 64)) == {"0.fc.weight"}


@torch.no_grad()
def test_a_weight_of_integers_is_not_named_after_its_scale() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Buffer(torch.randint(-9, 9, (64, 64), dtype=torch.int8) * (torch.rand(64, 64) < 0.2))
            self._scale_0 = nn.Buffer(torch.rand(64, 1))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight.float() * self._scale_0)

    assert layer_names(Scaled(), torch.randn(8, 64)) == {"weight"}


@torch.no_grad()
def test_attention_is_named_by_its_module() -> None:
    class Attending(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=MASK)

    model, x = nn.Sequential(Attending(), nn.ModuleDict({"two": Attending()})["two"]), torch.randn(1, 2, 256, 16)
    assert layer_names(model, x) == {"0", "1"}
    decoder = nn.Sequential(Decoding(), Decoding())
    past = torch.randn(2, 1, 2, 64, 16)
    assert layer_names(decoder, (torch.randn(1, 2, 1, 16), past)) == {"0", "1"}


MASK = torch.ones(256, 256, dtype=torch.bool).tril().triu(-16)


class Decoding(nn.Module):
    """Attention of one query over a cache."""

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        query, (keys, values) = given
        return nn.functional.scaled_dot_product_attention(query, keys, values), given[1]


@torch.no_grad()
def test_modules_given_as_arguments_keep_their_variables() -> None:
    one, two = Layer(), Layer()
    assert layer_names(lambda a, b, x: b(a(x)), one, two, torch.randn(8, 64)) == {"a.fc.weight", "b.fc.weight"}
    found = layer_names(lambda layers, x: layers[1](layers[0](x)), [one, two], torch.randn(8, 64))
    assert found == {"layers.0.fc.weight", "layers.1.fc.weight"}


# What the backend compiles, explain explains


def test_fullgraph_and_dynamic_are_those_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="print"):
        gossamer.explain(Layer(broken=True), torch.randn(8, 64), fullgraph=True)
    given = list[Any]()
    monkeypatch.setattr("gossamer.backend.explain.sparse", lambda gm, inputs, **_: given.extend(inputs) or gm.forward)
    for dynamic in (True, False):
        given.clear()
        gossamer.explain(Layer(), torch.randn(8, 64), dynamic=dynamic, both=False)
        assert any(isinstance(each, torch.SymInt) for each in given) is dynamic


def test_compiled_models_are_explained() -> None:
    options, x = EAGER, torch.randn(8, 64)
    in_place = Layer()
    in_place.compile(backend="sparse", options=options)
    by_method = Layer()
    by_method.forward = torch.compile(by_method.forward, backend="sparse", options=options)  # type: ignore[method-assign]
    inside = nn.Sequential(torch.compile(Layer(), backend="sparse", options=options, fullgraph=True))
    for model in (in_place, by_method, inside, torch.compile(inside, backend="sparse", options=options)):
        model(x)
        report = explained(model, x, options=options)
        assert list(report.layers) == ["fc.weight" if model in (in_place, by_method) else "0.fc.weight"]
        model(x)


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_distributed_models_are_explained_bucket_by_bucket() -> None:
    model = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(3))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = prune_(model)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    ddp, x = nn.parallel.DistributedDataParallel(Stack(), bucket_cap_mb=4), torch.randn(8, 1024)
    for subject in (ddp, torch.compile(ddp, backend="sparse", options=EAGER)):
        report = explained(subject, x, sparse=3)
        assert set(report.layers) == {f"layers.{i}.weight" for i in range(3)}
        assert [line for line in report.graph_breaks if "DDPOptimizer" not in line] == []
    ddp(x).sum().backward()  # which torch refuses where a forward pass has been begun and not ended
    ddp(x).sum().backward()


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, block_mask=WINDOW)


WINDOW = create_block_mask(lambda b, h, q, k: (q - k).abs() < 32, None, None, 256, 256, device="cpu")


def test_attention_is_explained_with_its_gradients() -> None:
    given = [torch.randn(1, 2, 256, 16, requires_grad=True) for _ in range(3)]
    report = explained(windowed, *given)
    assert report.training and report.decisions[0].op == "attention" and given[0].grad is None


@pytest.mark.usefixtures("process_group")
def test_attention_in_a_distributed_model_is_explained_with_its_gradients() -> None:
    class Attending(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x).view(1, 1, 256, 64)
            return windowed(y, y, y)

    ddp = nn.parallel.DistributedDataParallel(Attending())
    assert explained(ddp, torch.randn(256, 64), sparse=2).training


def test_a_graph_network_that_samples_edges_is_explained() -> None:
    geometric = pytest.importorskip("torch_geometric.nn")
    model, edges = geometric.SuperGATConv(16, 16, heads=2), torch.randint(0, 50, (2, 200))
    report = gossamer.explain(model, torch.randn(50, 16), edges, options=EAGER)
    assert report.decisions and report.graph_breaks
    copy.deepcopy(model)  # its attention has a gradient, and is kept between calls


def test_hooks_around_a_model_run_as_in_a_call_and_leave_nothing() -> None:
    model, seen = Layer(), []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output))
    explained(model, torch.randn(8, 64))
    assert seen == []
