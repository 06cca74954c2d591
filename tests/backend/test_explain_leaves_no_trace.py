"""`gossamer.explain` leaves the model, its inputs and all random numbers as they were."""

import copy
import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gossamer
from tests.backend.explained import EAGER, Layer, both, explained
from tests.backend.harness import prune_


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


@pytest.mark.parametrize("first", [False, True])
def test_parameters_that_uncompiled_code_writes_to_stay(first: bool) -> None:
    class Clamped(Layer):
        def forward(self, x: Tensor) -> Tensor:
            if first:
                self.clamp()
            y = super().forward(x)
            if not first:
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


def test_a_model_that_another_function_names_stays() -> None:
    @torch.no_grad()
    def recalibrate(x: Tensor) -> Tensor:
        for each in map(lambda x: NORMED(x), [x]):  # noqa: C417
            x = _normed(each)
        return x

    before = copy.deepcopy(NORMED.state_dict())
    explained(recalibrate, torch.randn(8, 64))
    assert all(torch.equal(value, before[name]) for name, value in NORMED.state_dict().items())
    assert explained(_normed, torch.randn(8, 64)).other is not None  # as its weights require gradients


def _normed(x: Tensor) -> Tensor:
    return NORMED(x)


NORMED = Layer(nn.BatchNorm1d(64), broken=True)


def test_what_requires_gradients_stays() -> None:
    model, x = Layer(), torch.randn(8, 64)

    def saliency(x: Tensor) -> Any:
        model.fc.bias.requires_grad_(False)
        x.requires_grad_()
        model(x).sum().backward()
        return x.grad

    explained(saliency, x)
    assert not x.requires_grad and x.grad is None and model.fc.bias.requires_grad

    def write(x: Tensor) -> Tensor:
        y = model(x)
        print(end="")
        x.mul_(y.mean())
        return x

    explained(write, x)
    assert x.is_leaf and not x.requires_grad


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@both
def test_lazy_layers_stay_lazy(broken: bool) -> None:
    model, x = Layer(nn.LazyLinear(8), nn.LazyBatchNorm1d(), broken=broken), torch.randn(8, 64)
    assert explained(model, x, sparse=2).layers == {"fc.weight": True, "after.0.weight": True}
    assert type(model.after[0]) is nn.LazyLinear and nn.parameter.is_lazy(model.after[0].weight)
    assert model(x).shape == (8, 8) and type(model.after[0]) is nn.Linear


def test_random_generators_of_a_model_stay() -> None:
    class Drops(Layer):
        def __init__(self) -> None:
            super().__init__(broken=True)
            self.some = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * sum(each.random() for each in self.some[:2]) * float(self.some[2].rand() + RNG.random())

    model = Drops()
    explained(model, torch.randn(8, 64))
    fresh = random.Random(0), np.random.default_rng(0)
    assert [each.random() for each in model.some[:2]] == [each.random() for each in fresh]
    assert model.some[2].rand() == np.random.RandomState(0).rand() and RNG.random() == random.Random(0).random()


RNG = random.Random(0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_that_a_method_captures_stays() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.strided)

    class Holding(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            nested.mul_(2)
            return y

    explained(Holding(broken=True), torch.randn(8, 64))
    assert (nested.values() == 1).all()


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
