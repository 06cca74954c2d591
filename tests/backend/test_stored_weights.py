"""SparseTensor parameters train on their nonzeros, by the kernels of pruned layers, to the numbers of dense masked training."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import SparseTensor
from gossamer.backend.graph.stored_matrix import StoredMatrix
from gossamer.backend.run import packed_weights
from gossamer.runtime.packing import pack
from gossamer.runtime.target import host
from gossamer.sparsity.prepare import Mask
from tests.backend.harness import Run, assert_same, compile_and_run, losses_of_steps, prune_

FORWARD_AND_BACKWARD = [
    ("0.weight", "linear"),
    ("2.weight", "linear"),
    ("2.weight", "linear backward"),
    ("2.weight", "sample"),
    ("0.weight", "sample"),
]


def masked(density: float = 0.2, sizes: tuple[int, int, int] = (64, 96, 64)) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*sizes[:2]), nn.ReLU(), nn.Linear(*sizes[1:]))
    return gossamer.sparsify(model, "magnitude", density=density)


def run_of(model: nn.Module, *inputs: Tensor, **options: object) -> Run:
    """Compiled, with the products forward and backward and the gradients of both weights asserted to be sparse."""
    run = compile_and_run(model, *inputs, grad=True, regions=5, **options)
    assert [
        (d.name.removesuffix("._positions1"), d.op.split()[0] if d.op.startswith("sample") else d.op) for d in run.regions
    ] == (FORWARD_AND_BACKWARD)
    return run


def losses(
    model: nn.Module, call: Callable[..., Tensor], make: Callable[..., torch.optim.Optimizer], steps: int = 6
) -> list[float]:
    torch.manual_seed(1)
    x, target = torch.randn(48, 64), torch.randn(48, 64)
    return losses_of_steps(call, make(model.parameters()), x, target, steps)


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_blocks_of_bf16_are_those_of_float64(dynamic: bool) -> None:
    """The report names the schedule of blocks where the machine has its dot products."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    for layer in (model[0], model[2]):
        kept = torch.rand(layer.out_features // 32, layer.in_features // 32) < 0.5
        kept[0, 0] = True
        layer.weight.data *= kept.repeat_interleave(32, 0).repeat_interleave(32, 1)
    exact = copy.deepcopy(model).bfloat16().double()
    stored = gossamer.store_sparse(model.bfloat16(), densest=1.0)
    x = torch.randn(48, 64).bfloat16()
    run = compile_and_run(stored, x, grad=True, dense="inductor", min_gain=0.0, dynamic=dynamic)
    samples = [d for d in run.regions if d.op.startswith("sample")]
    blocks = "token-blocks" if "bf16dots" in host().instructions else "tokens"
    assert [d.schedule for d in samples] == [blocks] * 2
    for _ in range(2):  # with new values, too
        for tokens in (48, 33) if dynamic else (48,):
            x = torch.randn(tokens, 64).bfloat16()
            for module, given in ((stored, x), (exact, x.double())):
                module.zero_grad()
                (run.function(given) if module is stored else module(given)).float().square().sum().backward()
            for mine, theirs in zip((stored[0], stored[2]), (exact[0], exact[2]), strict=True):
                gradient = mine.weight.grad.to_dense()
                expected = theirs.weight.grad * (theirs.weight != 0)
                assert (gradient.double() - expected).abs().max() <= 0.03 * expected.abs().max()
        with torch.no_grad():
            for mine, theirs in zip(stored.parameters(), exact.parameters(), strict=True):
                mine.mul_(0.5)
                theirs.mul_(0.5)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001),
}


def test_every_optimizer_trains_as_under_masks() -> None:
    model = gossamer.store_sparse(masked())
    run = run_of(model, torch.randn(48, 64), dense="inductor")
    start = copy.deepcopy(model.state_dict())
    for name, make in OPTIMIZERS.items():
        model.load_state_dict(start)
        twin = masked()
        expected = losses(twin, twin, OPTIMIZERS["adamw"] if name == "fused" else make)
        assert_same(torch.tensor(losses(model, run.function, make)), torch.tensor(expected))
        for layer in (0, 2):
            assert_same(model[layer].weight.detach().to_dense(), twin[layer].weight.detach())
    assert len(run.regions) == 5


@pytest.mark.parametrize("density", [0.02, 1 / 3])
def test_sizes_and_densities(density: float) -> None:
    model, twin = masked(density, (37, 131, 23)), masked(density, (37, 131, 23))
    x = torch.randn(2, 7, 37)
    run = run_of(gossamer.store_sparse(model), x)
    for call in (run.function, twin):
        call(x).square().sum().backward()
    for layer in (0, 2):
        original, mask = twin[layer].parametrizations.weight.original, twin[layer].parametrizations.weight[0].mask
        assert_same(model[layer].weight.grad.to_dense(), original.grad * mask)
        assert_same(model[layer].bias.grad, twin[layer].bias.grad)


def test_another_pattern_is_packed_without_compiling() -> None:
    model, x = gossamer.store_sparse(masked()), torch.randn(48, 64)
    run = run_of(model, x)
    denser = gossamer.store_sparse(masked(0.3))
    with torch.no_grad():
        for layer in (0, 2):
            model[layer].weight = denser[layer].weight
    assert_same(run.function(x).detach(), denser(x).detach())


def test_clipping_scaling_accumulation_and_averages() -> None:
    """What training loops do beside steps: over compiled calls, against the same with dense masked weights."""

    def train(model: nn.Module, call: Callable[..., Tensor]) -> tuple[list[Tensor], nn.Module]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler, average = torch.amp.GradScaler("cpu"), torch.optim.swa_utils.AveragedModel(model, use_buffers=False)
        torch.manual_seed(1)
        norms = []
        for _ in range(3):
            for _ in range(2):
                scaler.scale(call(torch.randn(48, 64)).square().mean()).backward()
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            average.update_parameters(model)
        return norms, average.module

    model, twin = gossamer.store_sparse(masked()), masked()
    run = run_of(model, torch.randn(48, 64))
    (norms, average), (expected, average_of_twin) = train(model, run.function), train(twin, twin)
    assert_same(torch.stack(norms), torch.stack(expected))
    for ours, theirs in ((model, twin), (average, average_of_twin)):
        assert_same(ours[2].weight.detach().to_dense(), theirs[2].weight.detach())


def test_a_dense_parameter_that_trains_stays_dense_where_gathering_it_does_not_pay() -> None:
    run = compile_and_run(masked(0.1), torch.randn(48, 64), grad=True, regions=0, min_gain=1.1)
    assert all("gossamer.store_sparse" in d.reason or "too small" in d.reason for d in run.decisions), run.decisions


def test_store_sparse_keeps_what_masks_keep() -> None:
    layer = nn.Linear(8, 4)
    mask = torch.zeros(4, 8)
    mask[:, :2] = 1
    nn.utils.parametrize.register_parametrization(layer, "weight", Mask(mask))
    with torch.no_grad():
        layer.parametrizations.weight.original[0, 0] = 0  # type: ignore[union-attr, index]
    gossamer.store_sparse(layer)
    assert isinstance(layer.weight, SparseTensor) and layer.weight.nnz == 8 and list(layer._parameters) == ["weight", "bias"]
    with pytest.raises(gossamer.OptionError, match="prune the model first"):
        gossamer.store_sparse(nn.Linear(8, 4))


class Tied(nn.Module):
    """Two layers with one weight, and one whose weight an embedding has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.second, self.head = nn.Embedding(32, 48), *(nn.Linear(48, n) for n in (48, 48, 32))
        self.second.weight, self.head.weight = self.first.weight, self.words.weight
        prune_(self)

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.head(self.second(torch.relu(self.first(self.words(words)))))
        return y


def test_layers_that_share_a_weight() -> None:
    model, twin = (gossamer.store_sparse(Tied()) if stored else Tied() for stored in (True, False))
    assert isinstance(model.first.weight, SparseTensor) and model.first.weight is model.second.weight
    assert model.head.weight is model.words.weight and not isinstance(model.head.weight, SparseTensor)
    words, mask = torch.randint(32, (40,)), model.first.weight.to_dense() != 0
    twin.load_state_dict({n: p.to_dense() if isinstance(p, SparseTensor) else p for n, p in model.state_dict().items()})
    run = compile_and_run(model, words, grad=True)
    run.output.square().sum().backward()
    twin(words).square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        expected = other.grad * mask if name == "first.weight" else other.grad
        assert_same(one.grad.to_dense() if isinstance(one.grad, SparseTensor) else one.grad, expected)


def test_batches_of_any_size_empty_ones_and_nan() -> None:
    """Sizes that change from call to call, none at all, and NaN, which reaches what it is multiplied with, as stored."""
    model, twin = gossamer.store_sparse(masked()), masked()
    first = torch.randn(48, 64)
    torch._dynamo.decorators.mark_unbacked(first, 0)
    run = compile_and_run(model, first, grad=True, regions=5)
    for rows in (48, 5, 1, 0):
        x = torch.randn(rows, 64)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        for each, call in ((model, run.function), (twin, twin)):
            each.zero_grad()
            call(x).square().sum().backward()
        for layer in (0, 2):
            original, mask = twin[layer].parametrizations.weight.original, twin[layer].parametrizations.weight[0].mask
            assert_same(model[layer].weight.grad.to_dense(), original.grad * mask)
            assert_same(model[layer].bias.grad, twin[layer].bias.grad)
    x = torch.randn(48, 64)
    x[7] = torch.nan
    y = run.function(x)
    assert bool(y[7].isnan().all()) and not bool(y[:7].isnan().any()) and not bool(y[8:].isnan().any())


def test_stored_zeros_train_on_though_no_kernel_had_them_first() -> None:
    """Packed for inference a weight has its nonzeros alone; the first new values bring its zeros in."""
    models = masked(), gossamer.store_sparse(masked())
    for model in models:
        with torch.no_grad():
            if isinstance(model[0].weight, SparseTensor):
                model[0].weight.values()[::2] = 0
                model[2].weight.values().zero_()
            else:
                stored = model[0].parametrizations.weight[0].mask.bool()
                zero = stored.flatten().nonzero().flatten()[::2]
                model[0].parametrizations.weight.original.view(-1)[zero] = 0
                model[2].parametrizations.weight.original.zero_()
    run = compile_and_run(models[1], torch.randn(48, 64), grad=True, regions=None)
    found, expected = (
        losses(model, call, OPTIMIZERS["sgd"]) for model, call in ((models[1], run.function), (models[0], models[0]))
    )
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert torch.count_nonzero(models[1][2].weight.values()) > 0


def test_nonzeros_that_moved_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the zeros that have grown, which the next step changes."""
    model, x = gossamer.store_sparse(masked()), torch.randn(48, 64)
    run = run_of(model, x)
    other = gossamer.store_sparse(masked())
    with torch.no_grad():
        for layer in (0, 2):
            other[layer].weight.values()[::4] = 0
            model[layer].weight = other[layer].weight
    packed, without = list[object](), StoredMatrix.packed
    monkeypatch.setattr(packed_weights, "pack", lambda *given: packed.append(given) or pack(*given))
    monkeypatch.setattr(StoredMatrix, "packed", lambda *given: packed.append(given) or without(*given))
    for _ in range(3):
        run.function(x).sum().backward()
        with torch.no_grad():
            for layer in (0, 2):
                model[layer].weight.add_(model[layer].weight.grad, alpha=-0.01)
    assert len(packed) == 3  # forward twice, backward once
    dense = copy.deepcopy(model)
    assert_same(run.function(x).detach(), dense(x).detach())
