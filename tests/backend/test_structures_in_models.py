"""Models around structured matrices and many adapters: copies, files, layouts of inputs, NaN, empty and odd batches."""

import copy
import io
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.backend.report.report import collect

OPTIONS = {"strict": True, "dense": "eager"}
FEATURES, COUNT = 256, 6


def kron(p: Sequence[Tensor], x: Tensor, who: Tensor) -> Tensor:
    return F.linear(x, torch.kron(p[0], p[1]))


def monarch(p: Sequence[Tensor], x: Tensor, who: Tensor) -> Tensor:
    h = torch.einsum("tkp,kqp->tkq", x.reshape(-1, 16, 16), p[0]).transpose(1, 2)
    return torch.einsum("tlr,lsr->tls", h, p[1]).transpose(1, 2).reshape(x.shape)


def butterfly(p: Sequence[Tensor], x: Tensor, who: Tensor) -> Tensor:
    h = x.reshape(-1, FEATURES)
    for stage, apart in zip(p, (64, 16, 4, 1), strict=True):
        parts = h.view(-1, 64 // apart, 4, apart)
        h = torch.einsum("tgia,gaji->tgja", parts, stage.view(64 // apart, apart, 4, 4)).reshape(-1, FEATURES)
    return h.view(x.shape)


def adapters(p: Sequence[Tensor], x: Tensor, who: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(x, p[0][who]), p[1][who])


KINDS: dict[Callable[..., Tensor], tuple[tuple[int, ...], ...]] = {
    kron: ((16, 16), (16, 16)),
    monarch: ((16, 16, 16), (16, 16, 16)),
    butterfly: ((64, 4, 4),) * 4,
    adapters: ((COUNT, FEATURES, 8), (COUNT, 8, FEATURES)),
}


class Model(nn.Module):
    """A norm, a structure, an activation, a pruned layer, and a residual. x is [sequences, tokens, 256]."""

    def __init__(self, written: Callable[..., Tensor]) -> None:
        super().__init__()
        self.written = written
        self.norm, self.out = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES)
        self.factors = nn.ParameterList([torch.randn(shape) / shape[-1] ** 0.5 for shape in KINDS[written]])
        with torch.no_grad():
            self.out.weight *= torch.rand_like(self.out.weight) < 0.1

    def forward(self, x: Tensor, who: Tensor) -> Tensor:
        return x + self.out(F.gelu(self.written(list(self.factors), self.norm(x), who)))


def compiled(model: nn.Module, **how: object) -> Callable[..., Tensor]:
    lowest = {"min_gain": 0} if model.written is adapters else {}
    call: Callable[..., Tensor] = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS | lowest, **how)
    return call


def batch(sequences: int, tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(sequences, tokens, FEATURES), torch.randint(COUNT, (sequences,))


def check(call: Callable[..., Tensor], model: nn.Module, x: Tensor, who: Tensor) -> None:
    with torch.no_grad():
        y, expected = call(x, who), copy.deepcopy(model).double()(x.double(), who)
    assert y.shape == expected.shape and y.stride() == model(x, who).stride()
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("written", KINDS)
def test_copies_and_loaded_files_compute_with_their_own_factors(written: Callable[..., Tensor]) -> None:
    model, given = Model(written).eval(), batch(4, 32)
    call = compiled(model)
    with collect() as found:
        check(call, model, *given)
    assert sum(each.sparse or each.format == "factors" for each in found.decisions) >= 2  # the pruned layer is one
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.factors[0].neg_()
        model.factors[1].mul_(0.5)
    check(compiled(twin), twin, *given)
    check(call, model, *given)
    file, other = io.BytesIO(), Model(written).eval()
    torch.save(call.state_dict(), file)  # type: ignore[attr-defined]
    file.seek(0)
    other.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in torch.load(file).items()})
    again = compiled(other)
    check(again, other, *given)
    with torch.no_grad():
        torch.testing.assert_close(again(*given), call(*given), rtol=0, atol=0)
    file.seek(0)
    call.load_state_dict({f"_orig_mod.{k.removeprefix('_orig_mod.')}": v * 2 for k, v in torch.load(file).items()})  # type: ignore[attr-defined]
    check(call, model, *given)


@pytest.mark.parametrize("written", KINDS)
def test_inputs_in_other_layouts_and_with_nan(written: Callable[..., Tensor]) -> None:
    model = Model(written).eval()
    call = compiled(model)
    x, who = batch(4, 32)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    spread = torch.randn(4, 32, 2 * FEATURES)[..., ::2]
    repeated = x[:1].expand(4, -1, -1)
    features_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    broken = x.clone()
    broken[1, 3, 5], broken[2, 0, 0] = float("nan"), float("inf")
    for each in (x, turned, spread, repeated, features_first, broken):
        check(call, model, each, who)
    with torch.no_grad():
        wrong = call(broken, who).isnan().any(-1).nonzero().tolist()
    assert wrong == [[1, 3], [2, 0]]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("written", KINDS)
def test_empty_single_and_odd_batches(written: Callable[..., Tensor], dynamic: bool | None) -> None:
    model = Model(written).eval()
    call = compiled(model, dynamic=dynamic)
    for sequences, tokens in ((4, 32), (0, 32), (1, 1), (3, 37), (4, 0), (7, 11)):
        check(call, model, *batch(sequences, tokens))


@pytest.mark.parametrize("written", KINDS)
def test_training_steps_between_evaluations(written: Callable[..., Tensor]) -> None:
    model, given = Model(written), batch(3, 33)
    twin = copy.deepcopy(model).double()
    call = compiled(model)
    wide = given[0].double(), given[1]
    for _ in range(2):
        for each, function, inputs in ((model, call, given), (twin, twin, wide)):
            each.train()
            function(*inputs).square().mean().backward()
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter -= parameter.grad
                    parameter.grad = None
            each.eval()
        check(call, model, *given)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4)
