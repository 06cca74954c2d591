"""`gossamer.prune` on nn.MultiheadAttention: its projections as linear layers, its results as torch's own, also by the fused
path."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.sparsity.torch_functions.open_attention import PROJECTIONS, open_attention
from tests.backend.harness import compile_and_run

MASK, PADDING = torch.ones(6, 6).tril() == 0, torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"batch_first": True}, {"need_weights": False, "attn_mask": MASK}),
    ({"batch_first": True, "bias": False}, {"key_padding_mask": PADDING}),
    ({"batch_first": True}, {"key_padding_mask": PADDING, "attn_mask": MASK, "need_weights": False, "is_causal": True}),
    ({"add_bias_kv": True, "add_zero_attn": True}, {"average_attn_weights": False}),
    ({"batch_first": True, "kdim": 5, "vdim": 7}, {}),
]


@pytest.mark.parametrize(("made", "called"), CASES, ids=str)
@torch.no_grad()
def test_open_attention_computes_what_torchs_does(made: dict[str, Any], called: dict[str, Any]) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, **made).double().eval()
    for parameter in attention.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(2, 6, 8).double()
    others = [torch.randn(2, 6, width).double() for width in (made.get("kdim", 8), made.get("vdim", 8))]
    given = [x, x, x] if "kdim" not in made else [x, *others]
    if not made.get("batch_first"):
        given = [each.transpose(0, 1) for each in given]
    state, attributes, seen = attention.state_dict(), set(vars(attention)), []
    wanted = attention(*given, **called)
    fused = torch.backends.mha.get_fastpath_enabled()
    with open_attention(attention):
        for name in PROJECTIONS:
            attention.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        found = attention(*given, **called)
    assert all(a is b for a, b in zip(seen, given, strict=True))
    assert torch.backends.mha.get_fastpath_enabled() == fused
    assert set(vars(attention)) == attributes and attention.state_dict().keys() == state.keys()
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


class Apart(nn.Module):
    """The same attention, of linear layers."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        weights, biases = attention.in_proj_weight.detach().chunk(3), attention.in_proj_bias.detach().chunk(3)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))
        for layer, weight, bias in zip((self.q_proj, self.k_proj, self.v_proj), weights, biases, strict=True):
            layer.weight.data, layer.bias.data = weight.clone(), bias.clone()
        self.out_proj = copy.deepcopy(attention.out_proj)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        q, k, v = (
            layer(each).unflatten(-1, (4, 4)).transpose(1, 2)
            for layer, each in zip((self.q_proj, self.k_proj, self.v_proj), (q, k, v), strict=True)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out_proj(y.transpose(1, 2).flatten(2)), None


class Crossed(nn.Module):
    """Attention of one's own, and to others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own, self.other = (nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2))
        for attention in (self.own, self.other):
            nn.init.normal_(attention.in_proj_bias)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.own(x, x, x)[0]
        y: Tensor = self.head(x + self.other(x, memory, memory.flip(1))[0])
        return y


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(16, 16, generator=generator) / 4
    return [tuple(torch.randn(8, n, 16, generator=generator) @ mixed for n in (7, 9)) for _ in range(count)]  # type: ignore[misc]


@pytest.mark.parametrize("options", [{}, {"budget": "sensitivity"}, {"sequential": False}, {"method": "wanda"}], ids=str)
def test_projections_are_pruned_as_linear_layers_are(options: dict[str, Any]) -> None:
    """In doubles: the two models differ by rounding, which decides between weights that f32 cannot tell apart."""
    model, apart = Crossed(), Crossed()
    apart.own, apart.other = Apart(apart.own), Apart(apart.other)  # type: ignore[assignment]
    data = [(x.double(), memory.double()) for x, memory in batches()]
    report, expected = (gossamer.prune(each.double(), data, 0.5, **options) for each in (model, apart))
    assert [line.name for line in report.layers] == [line.name for line in expected.layers]
    assert len(report.layers) == 9 and not any(line.note for line in report.layers)
    for ours, theirs in ((model.own, apart.own), (model.other, apart.other)):
        for kind, whole in (("weight", ours.in_proj_weight), ("bias", ours.in_proj_bias)):
            parts = torch.cat([getattr(theirs.get_submodule(name), kind) for name in PROJECTIONS])
            torch.testing.assert_close(whole, parts, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.out_proj.weight, theirs.out_proj.weight, rtol=1e-6, atol=1e-6)


class Padded(nn.Module):
    """Called as models of Hugging Face are, its attention with tokens first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=batch_first)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = x if self.attention.batch_first else x.transpose(0, 1)
        y: Tensor = self.attention(x, x, x, key_padding_mask=attention_mask == 0)[0]
        return y


def test_padding_does_not_count_where_tokens_come_first() -> None:
    mask = torch.ones(8, 7, dtype=torch.int64)
    mask[::2, 4:] = 0
    data = [{"x": torch.where(mask[..., None] > 0, x, 50.0), "attention_mask": mask} for x, _ in batches()]
    models = [Padded(batch_first) for batch_first in (True, False)]
    for model in models:
        gossamer.prune(model, data, 0.5)
    torch.testing.assert_close(models[0].attention.in_proj_weight, models[1].attention.in_proj_weight)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, norm_first=False)
    return nn.TransformerEncoder(layer, 2)


def test_encoders_are_pruned_whole_and_all_ways_of_running_agree(tmp_path: Path) -> None:
    model, dense, fresh = encoder(), encoder(), encoder()
    data = [x for x, _ in batches()]
    report = gossamer.prune(model, data, 0.6, resume=tmp_path / "run")
    assert len(report.layers) == 12 and not any(line.note for line in report.layers)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            assert float((parameter == 0).float().mean()) == pytest.approx(0.6, abs=0.02)
    again = gossamer.prune(dense, data, 0.6, resume=tmp_path / "run")
    assert {line.name for line in again.layers} == {line.name for line in report.layers}
    gossamer.save(model, tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = encoder()
    for each in (fresh, empty):
        gossamer.load(each, tmp_path / "model.safetensors")
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.no_grad():
            torch.backends.mha.set_fastpath_enabled(True)
            wanted = model.eval()(data[0])
            for other in (dense, fresh, empty):
                assert torch.equal(other.eval()(data[0]), wanted)
            torch.backends.mha.set_fastpath_enabled(False)
            torch.testing.assert_close(model(data[0]), wanted)
            torch._dynamo.reset()
            run = compile_and_run(model, data[0])
            torch.testing.assert_close(run.output, wanted, rtol=1e-4, atol=1e-5)
            names = {decision.name for decision in run.regions}
            assert sum("in_proj_weight" in name for name in names) == 2, names
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def test_parts_can_be_named_and_what_is_left_stays() -> None:
    model, before = Crossed(), Crossed()
    report = gossamer.prune(model, batches(), 0.5, only=["own.q_proj", "other.v_proj"])
    assert [line.name for line in report.layers] == ["own.q_proj", "other.v_proj"]
    assert torch.equal(model.own.in_proj_weight[16:], before.own.in_proj_weight[16:])
    assert (model.own.in_proj_weight[:16] == 0).float().mean() == 0.5
    assert torch.equal(model.other.in_proj_weight[:32], before.other.in_proj_weight[:32])
    with pytest.raises(gossamer.OptionError, match=r"'own\.in_proj' .*: there are own\.out_proj, own\.q_proj"):
        gossamer.prune(model, batches(), 0.5, only="own.in_proj")


def tied(model: Crossed) -> nn.Module:
    model.other.in_proj_weight = model.own.in_proj_weight
    return model


def shared(model: Crossed) -> nn.Module:
    model.other = model.own
    return model


class Scaled(nn.MultiheadAttention):
    """Attention that computes in a way of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tuple(None if each is None else 2 * each for each in super().forward(*args, **kwargs))


def test_attention_with_a_forward_of_its_own_stays() -> None:
    model = Crossed()
    model.other.__class__ = Scaled
    before = copy.deepcopy(model.other.state_dict())
    report = gossamer.prune(model, batches(), 0.5)
    assert [line.name for line in report.layers if "reads the weight itself" in line.note] == ["other.out_proj"]
    assert all(torch.equal(before[name], after) for name, after in model.other.state_dict().items())
    with pytest.raises(
        gossamer.OptionError, match=r"'other\.in_proj_weight' is of a subclass of nn.MultiheadAttention with its own `forward`"
    ):
        gossamer.prune(model, batches(), 0.5, only=nn.MultiheadAttention)
    alone = nn.MultiheadAttention(16, 4)
    assert len(gossamer.prune(alone, [(x, x, x) for x, _ in batches()], 0.5).layers) == 4


def test_tied_parameters_stay_and_shared_modules_are_pruned_once() -> None:
    model, before = tied(Crossed()), Crossed()
    report = gossamer.prune(model, batches(), 0.5)
    assert [line.name for line in report.layers] == ["own.out_proj", "other.out_proj", "head"]
    assert torch.equal(model.own.in_proj_weight, before.own.in_proj_weight)  # type: ignore[union-attr, arg-type]
    report = gossamer.prune(shared(Crossed()), batches(), 0.5)
    assert sorted(line.name for line in report.layers) == ["head", *(f"own.{n}_proj" for n in ("k", "out", "q", "v"))]


def broken(model: Crossed) -> nn.Module:
    with torch.no_grad():
        model.own.in_proj_weight[20, 3] = torch.nan
    return model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (broken, r"weight of 'own\.k_proj' has a NaN"),
        (lambda model: model.to("meta"), "on meta, must be floats in memory"),
    ],
)
def test_what_cannot_be_pruned_is_refused_and_the_model_stays(change: Callable[[Any], nn.Module], said: str) -> None:
    model = change(Crossed())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(gossamer.OptionError, match=said):
        gossamer.prune(model, batches(), 0.5)
    assert before.keys() == model.state_dict().keys() and "forward" not in vars(model.own)
    for name, after in model.state_dict().items():
        assert after.is_meta or torch.equal(after.nan_to_num(), before[name].nan_to_num())


def test_a_run_that_was_broken_off_leaves_attention_as_it_was() -> None:
    model, before = Crossed(), Crossed()

    def breaks(*_: Any) -> None:
        if bool((model.own.in_proj_weight == 0).any()):
            raise KeyboardInterrupt

    hook = model.other.register_forward_pre_hook(breaks)
    with pytest.raises(KeyboardInterrupt):
        gossamer.prune(model, batches(), 0.5)
    hook.remove()
    for (name, ours), theirs in zip(model.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def is_zero(attention: nn.MultiheadAttention) -> Tensor:
    return attention.in_proj_weight.detach() == 0


def test_zeros_stay_in_training() -> None:
    model, teacher = Crossed(), Crossed()
    gossamer.prune(model, batches(), 0.5)
    before = is_zero(model.own), is_zero(model.other), model.own.in_proj_weight.detach().clone()
    gossamer.distill(model, teacher, batches(), gossamer.DistillationLoss(logits=1.0), steps=5)
    assert torch.equal(is_zero(model.own), before[0]) and torch.equal(is_zero(model.other), before[1])
    assert not torch.equal(model.own.in_proj_weight, before[2])
    gossamer.distill(model, teacher, batches(), gossamer.DistillationLoss(logits=1.0), sparsity=0.75, steps=10)
    assert is_zero(model.own).float().mean() == 0.75


@pytest.mark.parametrize("recipe", ["gradual", "rigl", "sr-ste", "soft"])
def test_recipes_take_attention_too(recipe: str) -> None:
    model = Crossed()
    parameter, keys = model.own.in_proj_weight, model.state_dict().keys()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = gossamer.train_sparse(model, optimizer, recipe, steps=8, **({} if recipe == "sr-ste" else {"sparsity": 0.5}))
    names = ["own.in_proj_weight", "own.out_proj", "other.in_proj_weight", "other.out_proj", "head"]
    assert sorted(training.densities()) == sorted(names)
    for x, memory in batches(8):
        optimizer.zero_grad()
        model(x, memory).square().mean().backward()
        optimizer.step()
    state = training.state_dict()
    training.load_state_dict(state)
    densities = training.densities()
    assert 0.4 < densities["own.in_proj_weight"] < 0.6
    training.detach()
    assert model.own.in_proj_weight is parameter and model.state_dict().keys() == keys
    assert float(is_zero(model.own).float().mean()) == pytest.approx(1 - densities["own.in_proj_weight"])


def test_masks_of_sparsify_and_of_torch() -> None:
    model = gossamer.sparsify(Crossed(), "nm", only=nn.MultiheadAttention)
    x, memory = batches()[0]
    assert (is_zero(model.own).unflatten(1, (-1, 4)).sum(-1) == 2).all()
    with pytest.raises(gossamer.OptionError, match=r"'own\.in_proj_weight' has a mask"):
        gossamer.prune(model, batches(), 0.5, only=nn.MultiheadAttention)
    with pytest.raises(gossamer.OptionError, match=r"'own\.in_proj_weight' has a mask"):
        gossamer.recipes.GradualMasks(model)
    report = gossamer.prune(model, batches(), 0.5, skip="*.out_proj")
    assert report.left == {"ParametrizedMultiheadAttention": 2, "NonDynamicallyQuantizableLinear": 2}
    kept = is_zero(model.own)
    training = gossamer.train_sparse(model, torch.optim.SGD(model.parameters(), 0.1), "fixed", steps=8)
    assert not nn.utils.parametrize.is_parametrized(model.own)
    model(x, memory).square().mean().backward()
    assert not model.own.in_proj_weight.grad[kept].any()  # type: ignore[index]
    training.detach()
    assert torch.equal(is_zero(model.own), kept)
    hooked = Crossed()
    nn.utils.prune.l1_unstructured(hooked.own, "in_proj_weight", 0.5)
    with pytest.raises(gossamer.OptionError, match=r"'own\.in_proj_weight' has a mask: gossamer\.finalize"):
        gossamer.recipes.GradualMasks(hooked)
    assert len(gossamer.prune(gossamer.finalize(hooked), batches(), 0.5).layers) == 9
