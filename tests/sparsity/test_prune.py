"""`gossamer.prune`: models of every make, what is left alone, what is refused, runs that go on where they ended."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gossamer
from gossamer.sparsity.pruning import calibrate
from gossamer.sparsity.pruning.report import PruningReport


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(width, 48), nn.Linear(width, 48), nn.Linear(48, width, bias=False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(self.up(x).relu() * self.gate(x).sigmoid())


class Stack(nn.Module):
    """What the walk has to cope with: a layer in front of a chain of blocks, one behind it, one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.blocks = nn.Linear(12, 24), nn.ModuleList(Residual(24) for _ in range(3))
        self.out, self.never = nn.Linear(24, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.out(x)


def batches(*shape: int, count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(shape[-1], shape[-1], generator=generator)
    return [torch.randn(*shape, generator=generator) @ mixed for _ in range(count)]


def output_error(model: nn.Module, dense: nn.Module, data: list[Any]) -> float:
    with torch.no_grad():
        return sum(float((model(x) - dense(x)).square().sum() / dense(x).square().sum()) for x in data) / len(data)


@pytest.fixture
def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def test_a_chain_of_blocks_computes_what_the_whole_model_does(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    data, whole = batches(32, 12), copy.deepcopy(stack)
    report = gossamer.prune(stack, data, 0.5, skip="never")
    monkeypatch.setattr(calibrate, "chain_of_blocks", lambda *_: [])
    again = gossamer.prune(whole, data, 0.5, skip="never")
    assert [line.name for line in report.layers] == [line.name for line in again.layers]
    for (name, ours), theirs in zip(stack.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_methods_are_ordered_and_what_follows_makes_up_for_what_went_before(stack: Stack) -> None:
    data, errors = batches(64, 12), dict[str, float]()
    for name, options in {
        "magnitude": {"method": "magnitude"}, "sparsegpt": {"method": "sparsegpt"}, "admm": {"method": "admm"},
        "not sequential": {"sequential": False}, "best": {},
    }.items():  # fmt: skip
        model = copy.deepcopy(stack)
        report = gossamer.prune(model, data, 0.6, skip="never", **options)  # type: ignore[arg-type]
        assert report.sparsity == pytest.approx(0.6, abs=0.01)
        errors[name] = output_error(model, stack, batches(64, 12, count=9)[6:])
    assert errors["best"] <= errors["admm"] * 1.05 and errors["admm"] < errors["sparsegpt"] < errors["magnitude"]
    assert errors["best"] < errors["not sequential"]


def test_layers_that_the_data_do_not_reach_stay_dense(stack: Stack) -> None:
    before = stack.never.weight.clone()
    report = gossamer.prune(stack, batches(32, 12), 0.5)
    torch.testing.assert_close(stack.never.weight, before)
    assert [line.name for line in report.layers if line.note] == ["never"]
    assert "do not reach" in str(report) and "blocks.2.down" in str(report)


def test_budgets(stack: Stack) -> None:
    data, spared = batches(64, 12), copy.deepcopy(stack)
    report = gossamer.prune(spared, data, 0.6, budget="sensitivity", skip="never")
    assert report.sparsity == pytest.approx(0.6, abs=0.01)
    assert len({round(line.density, 1) for line in report.layers}) > 1
    loose, tight = (gossamer.prune(copy.deepcopy(stack), data, loss=loss, skip="never") for loss in (0.2, 0.02))
    assert tight.sparsity < loose.sparsity
    dense = sum(line.dense_us for line in report.layers)
    assert sum(line.us for line in gossamer.prune(copy.deepcopy(stack), data, latency=dense, skip="never").layers) <= dense


def test_a_run_that_was_broken_off_goes_on(stack: Stack, tmp_path: Path) -> None:
    data, whole, parts = batches(32, 12), copy.deepcopy(stack), copy.deepcopy(stack)
    report = gossamer.prune(whole, data, 0.5)
    calls = 0

    def fails(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise KeyboardInterrupt

    hook = parts.blocks[1].register_forward_pre_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        gossamer.prune(parts, data, 0.5, resume=tmp_path)
    hook.remove()
    again = copy.deepcopy(stack)
    resumed = gossamer.prune(again, data, 0.5, resume=tmp_path)
    assert list(tmp_path.glob("stage-*.pt"))
    assert sorted(line.name for line in resumed.layers) == sorted(line.name for line in report.layers)
    for ours, theirs in zip(again.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(gossamer.OptionError, match="sparsity"):
        gossamer.prune(again, data, 0.6, resume=tmp_path)


def test_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, (1, 3), dilation=(1, 2)),
        nn.Flatten(),
        nn.Linear(40, 4),
    )
    images, dense = batches(16, 3, 10, 10), copy.deepcopy(net)
    report = gossamer.prune(net, images, 0.5, only=[nn.Conv2d, nn.Linear])
    assert [line.shape for line in report.layers] == [(8, 27), (8, 24), (4, 40)]
    assert report.sparsity == pytest.approx(0.5, abs=0.02)
    assert output_error(net, dense, images) < 0.1


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_models_of_hugging_face_by_their_batches(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    make: dict[str, Callable[[], nn.Module]] = {
        "bert": lambda: transformers.BertModel(transformers.BertConfig(**sizes)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=16, n_head=2, n_layer=2)),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=1)),
    }
    model = make[kind]().train()
    ids = torch.randint(0, 64, (5, 8, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(8, 7, dtype=torch.int64)
    mask[::2, 5:] = 0
    data = [{"input_ids": each, "attention_mask": mask, "unheard of": 3} for each in ids]
    report = gossamer.prune(model, data, pattern="2:4", skip=["pooler*"] if kind == "bert" else ())
    assert model.training and not any(line.note for line in report.layers)
    assert len(report.layers) == {"bert": 12, "gpt2": 8, "llama": 15}[kind]
    for line in report.layers:
        weight = model.get_submodule(line.name).weight
        rows = weight.t() if kind == "gpt2" and "lm_head" not in line.name else weight
        assert (rows.unflatten(1, (-1, 4)).count_nonzero(-1) <= 2).all()  # type: ignore[operator, union-attr]


def test_the_result_is_compiled_to_sparse_kernels(stack: Stack) -> None:
    data = batches(32, 12)
    report = gossamer.prune(stack, data, 0.8, skip="never")
    assert isinstance(report, PruningReport)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(stack, backend="sparse", fullgraph=True, options={"min_gain": 0, "dense": "eager"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(data[0]), stack(data[0]), rtol=1e-4, atol=1e-4)
    assert counters["gossamer"]["regions"] == 11


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "one of sparsity"),
        ({"sparsity": 0.5, "latency": 3}, "one of sparsity"),
        ({"sparsity": 1.0}, "below 1"),
        ({"loss": -1}, "above 0"),
        ({"sparsity": 0.8, "pattern": "2:4"}, "50%"),
        ({"sparsity": 0.5, "method": "guess"}, "method 'guess'"),
        ({"sparsity": 0.5, "budget": "none"}, "budget"),
        ({"sparsity": 0.5, "only": "nobody"}, "nobody"),
        ({"sparsity": 0.5, "data": []}, "no batch"),
        ({"sparsity": 0.5, "data": torch.ones(2, 12)}, "must be batches"),
        ({"sparsity": 0.5, "data": [3]}, "a batch is"),
        ({"sparsity": 0.5, "data": [batches(1, 12)[0] * torch.inf]}, "inputs with NaN, infinity"),
        ({"sparsity": 0.5, "data": [{"y": torch.ones(1)}]}, "no argument of these names"),
    ],
)
def test_what_makes_no_sense_is_refused(stack: Stack, options: dict[str, Any], said: str) -> None:
    before = copy.deepcopy(stack.state_dict())
    with pytest.raises(gossamer.OptionError, match=said):
        gossamer.prune(stack, options.pop("data", batches(4, 12)), **options)
    assert all(torch.equal(before[name], value) for name, value in stack.state_dict().items())


def test_masked_layers_are_refused(stack: Stack) -> None:
    with pytest.raises(gossamer.OptionError, match="finalize"):
        gossamer.prune(gossamer.sparsify(stack, "magnitude", density=0.5), batches(4, 12), 0.5)


@pytest.mark.parametrize("value", [-0.1, 0, 1, torch.nan, "a", [0.5], True])
def test_shares_of_zeros_are_checked_everywhere(value: Any) -> None:
    model, data = nn.Sequential(nn.Linear(8, 8)), [torch.randn(4, 8)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls: list[Callable[[], object]] = [
        lambda: gossamer.prune(model, data, value),
        lambda: gossamer.recipes.GradualMasks(model, value),
        lambda: gossamer.train_sparse(model, optimizer, "gradual", steps=10, sparsity=value),
        lambda: gossamer.distill(model, model, data, gossamer.DistillationLoss(1.0), sparsity=value, steps=1),
    ]
    calls += [] if value == 1 and value is not True else [lambda: gossamer.sparsify(model, "magnitude", density=value)]
    for call in calls:
        with pytest.raises(gossamer.OptionError, match=r"is .*, must be a number above 0 and"):
            call()


def test_damping_and_tokens_are_checked() -> None:
    model, data = nn.Sequential(nn.Linear(8, 8)), [torch.randn(4, 8)]
    for damping in (-1, torch.nan, "a"):
        with pytest.raises(gossamer.OptionError, match="damping is"):
            gossamer.prune(model, data, 0.5, damping=damping)  # type: ignore[arg-type]
    with pytest.raises(gossamer.OptionError, match="tokens is 0"):
        gossamer.prune(model, data, 0.5, tokens=0)
