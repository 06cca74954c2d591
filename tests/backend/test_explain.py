"""What `gossamer.explain` reports: modes, layers, patterns, schedules and names."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.backend.page.advice import advice_for
from gossamer.backend.report.report import NO_PRODUCT, NO_ZEROS
from tests.backend.explained import DEFAULT, EAGER, Layer, explained
from tests.backend.harness import prune_, pruned

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


def test_nobody_is_told_to_prune_what_no_product_takes() -> None:
    """Tables that are looked up and positions that are added, unless a product takes them, too."""

    class Tokens(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
            self.positions = nn.Parameter(torch.randn(1, 16, 32))
            if tied:
                self.head.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.table(tokens) + self.positions[:, : tokens.shape[1]].expand(tokens.shape[0], -1, -1))

    tokens = torch.randint(64, (2, 8))
    with torch.no_grad():
        report = gossamer.explain(Tokens(tied=False).eval(), tokens, options=DEFAULT)
        shared = gossamer.explain(Tokens(tied=True).eval(), tokens, options=DEFAULT)
    assert {each.name: each.reason for each in report.decisions} == {
        "table.weight": NO_PRODUCT, "positions": NO_PRODUCT, "head.weight": NO_ZEROS,
    }  # fmt: skip
    assert [each["weights"] for each in advice_for(report.data())] == [["head.weight"]] and "is not pruned" in str(report)
    assert [each.reason for each in shared.decisions if each.name != "positions"] == [NO_ZEROS]


def test_a_model_that_a_merge_has_filled_is_not_passed_over() -> None:
    """As of LoRA's adapters, whose product has no zeros."""
    model = Layer()
    with torch.no_grad():
        model.fc.weight += torch.randn(64, 4) @ torch.randn(4, 64)
    report = explained(model, torch.randn(8, 64), options=DEFAULT, sparse=0)
    assert report.layers == {"fc.weight": False} and "it has no zeros" in str(report)


def test_operations_that_belong_to_no_region_have_kernels() -> None:
    """Their kernels are compiled when they are called, so no region has their keys."""

    def messages(edges: Tensor, x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])

    a, x = gossamer.SparseTensor.from_dense(torch.eye(60)), torch.randn(60, 16)
    with torch.no_grad():
        over_edges = gossamer.explain(messages, torch.randint(60, (2, 300)), x, options=EAGER)
        twice = gossamer.explain(lambda a, x: a @ torch.relu(a @ x), a, x, options=EAGER)
        fused = gossamer.explain(lambda a, x: torch.relu(a @ x), a, x, options=EAGER)
    assert [str(each).partition("\n")[0] for each in (over_edges, twice, fused)] == [
        f"gossamer, inference: 1 sparse on {kernels}, 0 left dense" for kernels in ("1 kernel", "2 kernels", "1 kernel")
    ]


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
@pytest.mark.parametrize("schedule", ["broadcast", "rowpairs", "lookup"])
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


def test_layers_around_a_compiled_part_are_explained() -> None:
    body, head = prune_(nn.Linear(64, 64)), prune_(nn.Linear(64, 32))
    encode = torch.compile(lambda x: body(x), backend="sparse", options=EAGER)

    @functools.wraps(encode)
    def classify(x: Tensor) -> Tensor:
        return head(encode(x))

    class Delegating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.compile(body, backend="sparse", options=EAGER), head

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("body"), name)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    assert "head.weight" in explained(classify, torch.randn(8, 64), sparse=2).layers
    assert "head.weight" in explained(Delegating(), torch.randn(8, 64), sparse=2).layers


def test_a_variable_without_a_value_is_no_error() -> None:
    model = Layer()

    def predict(x: Tensor) -> Tensor:
        return model(flatten(x)) if x.dim() != 2 else model(x)

    assert explained(predict, torch.randn(8, 64)).layers == {"model.fc.weight": True}
    flatten = nn.Flatten()
