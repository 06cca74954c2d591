"""`gossamer.quantize` on layers of every make: `Conv1D` of transformers, computed weights, and what is said to stay."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, remove_weight_norm, spectral_norm, weight_norm

import gossamer
from gossamer.sparsity.quantization.aware_linear import QuantizationAwareLinear
from gossamer.sparsity.quantization.grouped_linear import GroupedLinear
from gossamer.sparsity.quantization.quantized_linear import QuantizedLinear
from tests.backend.harness import compile_and_run, prune_

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from transformers.pytorch_utils import Conv1D  # noqa: E402

QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "int8": {}, "calibrated": {"data": True}, "int8 in groups": {"group": 16},
    "int4 in groups": {"weights": "int4", "group": 16},
}  # fmt: skip


def gpt2(share: float | None = None) -> nn.Module:
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_embd": 48, "n_head": 2, "vocab_size": 96, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    if share is not None:
        for layer in model.modules():
            if isinstance(layer, Conv1D):
                nn.init.normal_(layer.weight, std=0.2)
                nn.init.normal_(layer.bias)
                prune_(layer, share, (16, 1))  # along the inputs
    return model  # type: ignore[no-any-return]


TOKENS = torch.arange(14).view(2, 7)


def quantized(model: nn.Module, name: str) -> nn.Module:
    options = dict(QUANTIZATIONS[name])
    data = [{"input_ids": TOKENS}] if options.pop("data", None) else None
    return gossamer.quantize(model, data, **options)


@pytest.mark.parametrize("name", QUANTIZATIONS)
@torch.no_grad()
def test_gpt2_becomes_integers_as_if_its_layers_were_linear(name: str) -> None:
    model, floats = gpt2(0.5), gpt2(0.5)
    layer = model.get_submodule("transformer.h.0.attn.c_attn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized(model, name)
    kind = GroupedLinear if "groups" in name else QuantizedLinear
    assert layer is model.get_submodule("transformer.h.0.attn.c_attn")
    assert sum(type(module) is kind for module in model.modules()) == 8
    for (path, ours), theirs in zip(model.named_modules(), floats.modules(), strict=True):
        if isinstance(theirs, Conv1D):
            linear = nn.Linear(theirs.nx, theirs.nf)
            linear.weight, linear.bias = nn.Parameter(theirs.weight.t().contiguous()), theirs.bias
            expected: Any = (
                GroupedLinear.of(linear, 4 if "int4" in name else 8) if "groups" in name else QuantizedLinear.of(linear)
            )
            assert torch.equal(ours.weight, expected.weight), path  # type: ignore[arg-type]
            assert (ours.in_features, ours.out_features) == (theirs.nx, theirs.nf)
    exact, near = floats(TOKENS).logits, model(TOKENS).logits
    assert (near - exact).norm() < (0.25 if "int4" in name else 0.05) * exact.norm()
    torch._dynamo.reset()
    run = compile_and_run(lambda ids: model(ids, use_cache=False).logits, TOKENS)
    eager = model(TOKENS).logits
    assert (run.output - eager).norm() < 0.01 * eager.norm()  # activations at half steps may round to either integer
    assert len(run.regions) >= 8


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", QUANTIZATIONS)
@torch.no_grad()
def test_files_of_it_load_into_a_model_with_floats(name: str, device: str, tmp_path: Path) -> None:
    model = quantized(gpt2(0.5), name)
    gossamer.save(model, tmp_path / "model.safetensors")
    other = gpt2()
    if device == "meta":
        for module in other.modules():  # buffers that no file has stay
            for key, parameter in module._parameters.items():
                module._parameters[key] = parameter if parameter is None else nn.Parameter(parameter.to("meta"))
        other.tie_weights()
    gossamer.load(other, tmp_path / "model.safetensors")
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)
    assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]


def test_it_trains_for_int8_and_ends_in_it() -> None:
    model = gossamer.quantize(gpt2(0.5), aware=True)
    layers = [module for module in model.modules() if isinstance(module, QuantizationAwareLinear)]
    assert len(layers) == 8
    model(TOKENS).logits.square().mean().backward()
    assert all(layer.weight.grad is not None for layer in layers)
    with torch.no_grad():
        aware = model(TOKENS).logits
        gossamer.quantize(model)
        assert (model(TOKENS).logits - aware).norm() < 0.01 * aware.norm()


def with_norm(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    model: Any = prune_(nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 8)), 0.5)
    norms: dict[str, Callable[[nn.Module], object]] = {
        "old weight norm": weight_norm,
        "old spectral norm": spectral_norm,
        "weight norm": parametrizations.weight_norm,
        "pruning hook": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        norms[kind](model[0])
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["old weight norm", "old spectral norm", "weight norm", "pruning hook"])
@torch.no_grad()
def test_what_computes_a_weight_is_multiplied_in(kind: str) -> None:
    model, x = with_norm(kind).eval(), torch.randn(5, 24)
    wanted = model(x)
    weight = model[0].weight.detach().clone()
    gossamer.quantize(model)
    assert type(model[0]) is type(model[2]) is QuantizedLinear and not model[0]._forward_pre_hooks
    torch.testing.assert_close(model[0].weight, weight, rtol=0.02, atol=0.02)
    assert (model(x) - wanted).norm() < 0.05 * wanted.norm()
    assert {name.partition(".")[2] for name in model.state_dict()} == {"weight_int8", "weight_scale", "bias"}


@pytest.mark.parametrize("options", [{}, {"aware": True}, {"group": 16}])
@torch.no_grad()
def test_the_mask_of_a_bias_is_multiplied_in(options: dict[str, Any]) -> None:
    model, x = nn.Sequential(prune_(nn.Linear(32, 16), 0.5, (1, 16))), torch.randn(5, 32)
    prune.l1_unstructured(model[0], "weight", 0.2)
    prune.l1_unstructured(model[0], "bias", 3)
    bias, wanted = model[0].bias.clone(), model(x)
    gossamer.quantize(model, **options)
    assert torch.equal(model[0].bias, bias) and int((bias == 0).sum()) == 3 and "0.bias" in model.state_dict()
    assert (model(x) - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize(
    ("kind", "call"), [("old weight norm", "remove_weight_norm"), ("old spectral norm", "remove_spectral_norm")]
)
def test_others_say_how_to_make_it_plain(kind: str, call: str) -> None:
    data = [torch.randn(9, 24)]
    calls: list[Callable[[nn.Module], object]] = [
        lambda model: gossamer.prune(model, data, 0.5),
        lambda model: gossamer.sparsify(model, "nm"),
        lambda model: gossamer.recipes.GradualMasks(model),
    ]
    for each in calls:
        with pytest.raises(gossamer.OptionError, match=rf"'0' is computed from others: {call}\(layer, 'weight'\)"):
            each(with_norm(kind))
    report = gossamer.prune(with_norm(kind), data, 0.5, skip="0")
    assert report.left == {"Linear": 1} and "left as they were: 1 Linear" in str(report)
    model = with_norm("old weight norm")
    remove_weight_norm(model[0])
    assert len(gossamer.prune(model, data, 0.5).layers) == 2


class Grouped(nn.Linear):
    """Blocks on a diagonal, as DeepSeek V4 has them."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...gi,goi->...go", x, self.weight.unflatten(0, (2, -1)))


class Spelled(nn.Linear):
    """As Falcon has it."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Scaled(nn.Linear):
    """Nearly what nn.Linear computes, of small weights."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.9 * super().forward(x)


class Router(nn.Linear):
    """As Llama 4 has it."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y.topk(2)


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.head.weight = self.words.weight
        self.grouped, self.spelled, self.router = Grouped(8, 8), Spelled(8, 8), Router(8, 8)
        self.conv, self.dense, self.plain = nn.Conv1d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1 and "dense" not in name:
                    parameter[torch.rand(parameter.shape) < 0.5] = 0


LEFT = (
    r"leaves as floats: 1 Embedding \(no linear layer\); 1 Linear \(shares its weight\); 1 Grouped \(computes in a way of its "
    r"own\); 1 Router \(computes in a way of its own\); 1 Conv1d \(no linear layer\); 1 MultiheadAttention \(attention reads "
    r"its weight itself\); 1 NonDynamicallyQuantizableLinear \(attention reads its weight itself\)$"
)


def test_what_stays_is_said_by_kind() -> None:
    model = Many()
    before = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=LEFT) as caught:
        gossamer.quantize(model)
    assert caught[0].filename == __file__
    assert {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)} == {"spelled", "plain"}
    for name in ("grouped", "router", "conv", "attention.out_proj"):
        assert torch.equal(model.get_submodule(name).weight, before.get_submodule(name).weight)  # type: ignore[arg-type]
    left = [nn.Embedding, nn.Conv1d, nn.MultiheadAttention, Grouped, Router, "head", lambda _, layer: layer.in_features == 7]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gossamer.quantize(Many(), skip=[*left, "attention.*"])
        gossamer.quantize(Many(), only="plain")
    with pytest.warns(UserWarning, match=r"floats: 1 Conv2d \(no linear layer\)$"):
        gossamer.quantize(Many(), only=[nn.Conv2d, "plain"])


def test_quantize_says_that_it_has_changed_nothing() -> None:
    dense = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with pytest.warns(UserWarning, match=r"changed nothing: no linear layer has 10% of zeros. Prune the model first") as caught:
        gossamer.quantize(dense)
    assert caught[0].filename == __file__ and type(dense[0]) is nn.Linear
    with pytest.warns(UserWarning, match="changed nothing: without `only` it takes linear layers .* has 1 Conv2d"):
        gossamer.quantize(nn.Sequential(nn.Conv2d(4, 4, 3)))
    with pytest.warns(UserWarning, match="changed nothing: no layer is left by `only` and `skip`"):
        gossamer.quantize(dense, only="0", skip="0")


def test_zeros_that_fill_no_group_are_warned_of() -> None:
    model = nn.Sequential(prune_(nn.Linear(64, 32), 0.5), prune_(nn.Linear(32, 32), 0.5, (1, 16)))
    with pytest.warns(UserWarning, match=r"keeps all groups of 16 elements in 1 pruned layers \(0\).*pattern='1x16'") as caught:
        gossamer.quantize(model, weights="int4")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gossamer.quantize(nn.Sequential(prune_(nn.Linear(32, 32), 0.5, (1, 16))), weights="int4", group=16)
    with pytest.raises(gossamer.OptionError, match=r"group=32 is not supported: .* in groups of 16"):
        gossamer.quantize(model, group=32)


def test_subclasses_are_told_by_what_they_compute() -> None:
    for kind, taken in ((Spelled, True), (Scaled, False), (Grouped, False), (Router, False)):
        layer: Any = prune_(kind(8, 8), 0.5)
        with torch.no_grad():
            layer.weight.mul_(0.01)
            layer.bias.mul_(0.01)
        model = nn.Sequential(layer.bfloat16().train())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gossamer.quantize(model)
        assert isinstance(model[0], QuantizedLinear) == taken and model[0].training


def test_of_models_without_memory_or_layers() -> None:
    with torch.device("meta"):
        model = Many()
    with pytest.raises(gossamer.OptionError, match=r"'words\.weight' is on the meta device: gossamer\.load"):
        gossamer.quantize(model)
    nothing = nn.Sequential(nn.ReLU())
    with pytest.warns(UserWarning, match="changed nothing"):
        assert gossamer.quantize(nothing) is nothing


def test_shared_layers_are_quantized_once() -> None:
    layer: Any = prune_(Conv1D(24, 16), 0.5)
    model = nn.Sequential(layer, nn.Linear(24, 16), layer).eval()
    gossamer.quantize(model)
    assert model[0] is model[2] and isinstance(model[0], QuantizedLinear) and model(torch.randn(3, 16)).shape == (3, 24)
