"""Many adapters in one batch: each sequence's adapter is an expert of a low rank, read where it lies."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.backend.report.report import Decision, collect

OPTIONS = {"strict": True, "dense": "eager", "min_gain": 0}


class Served(nn.Module):
    """A layer with ten adapters of rank 8."""

    def __init__(self, written: Callable[["Served", Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.written = written
        self.layer = nn.Linear(32, 48, dtype=dtype)
        self.down = nn.Parameter(torch.randn(10, 32, 8, dtype=dtype) / 6)
        self.up = nn.Parameter(torch.randn(10, 8, 48, dtype=dtype) / 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layer(x) + self.written(self, x, ids)


def bmm(m: Served, x: Tensor, ids: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(x, m.down[ids]), m.up[ids]) * 2


def einsum(m: Served, x: Tensor, ids: Tensor) -> Tensor:
    return torch.einsum("bsr,brm->bsm", torch.einsum("bsk,bkr->bsr", x, m.down[ids]), m.up[ids])


def stored_transposed(m: Served, x: Tensor, ids: Tensor) -> Tensor:
    down, up = m.down.transpose(1, 2)[ids], m.up.index_select(0, ids)
    return (x @ down.mT) @ up


SPELLINGS = [bmm, einsum, stored_transposed]


def run(model: nn.Module, x: Tensor, ids: Tensor, **options: object) -> tuple[Tensor, list[Decision]]:
    with torch.no_grad(), collect() as found:
        y = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS | options)(x, ids)
    return y, found.decisions


def one_by_one(model: Served, x: Tensor, ids: Tensor) -> Tensor:
    """In float64, sequence by sequence."""
    twin = copy.deepcopy(model).double()
    with torch.no_grad():
        return torch.stack([twin(a[None].double(), i[None])[0] for a, i in zip(x, ids, strict=True)])


def close(y: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def in_place(decisions: list[Decision]) -> int:
    return sum(each.op == "adapters" and each.sparse for each in decisions)


@pytest.mark.parametrize("written", SPELLINGS)
@pytest.mark.parametrize("tokens", [1, 7])
def test_each_sequence_reads_its_adapter(written: Callable[[Served, Tensor, Tensor], Tensor], tokens: int) -> None:
    model, x, ids = Served(written), torch.randn(6, tokens, 32), torch.tensor([3, 0, 3, 9, 3, 1])
    y, decisions = run(model, x, ids)
    assert in_place(decisions) == 2
    close(y, one_by_one(model, x, ids))


def test_one_sequence_of_many_tokens() -> None:
    """Its number is expanded, so that all tokens share an element of memory."""
    model, x, ids = Served(bmm), torch.randn(1, 4000, 32), torch.tensor([7])
    y, decisions = run(model, x, ids)
    assert in_place(decisions) == 2
    close(y, one_by_one(model, x, ids))


def test_expanded_experts_of_routed_linear() -> None:
    x, weight = torch.randn(4000, 32), torch.randn(10, 8, 32)
    y = gossamer.routed_linear(x, torch.tensor([7]).expand(4000), weight)
    torch.testing.assert_close(y, x @ weight[7].T, rtol=1e-4, atol=1e-4)


def test_numbers_from_the_end_and_numbers_that_do_not_exist() -> None:
    model, x = Served(bmm), torch.randn(3, 4, 32)
    compiled = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS)
    with torch.no_grad():
        ids = torch.tensor([-1, 4, -10])
        close(compiled(x, ids), one_by_one(model, x, ids))
        with pytest.raises(Exception, match="10"):
            compiled(x, torch.tensor([0, 10, 1]))


def test_other_batches_and_changed_adapters() -> None:
    model = Served(bmm)
    compiled = torch.compile(model, backend="sparse", fullgraph=True, dynamic=True, options=OPTIONS)
    with torch.no_grad(), collect() as found:
        for sequences, tokens in ((6, 7), (3, 7), (8, 2)):
            x, ids = torch.randn(sequences, tokens, 32), torch.randint(10, (sequences,))
            close(compiled(x, ids), one_by_one(model, x, ids))
            model.up.mul_(1.5)
        model.load_state_dict(Served(bmm).state_dict())
        close(compiled(x, ids), one_by_one(model, x, ids))
    assert in_place(found.decisions) == 2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
def test_narrow_types(dtype: torch.dtype, tolerance: float) -> None:
    model, x, ids = Served(bmm, dtype), torch.randn(6, 5, 32, dtype=dtype), torch.randint(10, (6,))
    y, decisions = run(model, x, ids)
    assert in_place(decisions) == 2 and y.dtype == dtype
    close(y, one_by_one(model, x, ids), tolerance)


def test_a_nan_stays_with_its_token() -> None:
    model, x, ids = Served(bmm), torch.randn(4, 5, 32), torch.tensor([1, 1, 2, 1])
    x[1, 3, 0] = float("nan")
    y, _ = run(model, x, ids)
    assert y.isnan().any(-1).nonzero().tolist() == [[1, 3]]


def test_few_copies_stay_with_torch() -> None:
    model, x, ids = Served(bmm), torch.randn(6, 5, 32), torch.randint(10, (6,))
    y, decisions = run(model, x, ids, min_gain=1.1)
    assert in_place(decisions) == 0 and [each.op for each in decisions] == ["adapters"] * 2
    close(y, one_by_one(model, x, ids))


def test_many_copies_are_not_made() -> None:
    """Two MiB for each of four sequences and factor."""
    down, up = torch.randn(3, 8192, 64) / 90, torch.randn(3, 64, 8192) / 8
    x, ids = torch.randn(4, 2, 8192), torch.tensor([2, 0, 2, 1])

    def adapters(x: Tensor, ids: Tensor) -> Tensor:
        return x + torch.bmm(torch.bmm(x, down[ids]), up[ids])

    with torch.no_grad(), collect() as found:
        y = torch.compile(adapters, backend="sparse", fullgraph=True, options=OPTIONS | {"min_gain": 1.1})(x, ids)
        expected = adapters(x, ids)
    assert in_place(found.decisions) == 2
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("written", [bmm, einsum, stored_transposed])
def test_training_copies_no_factors(written: Callable[[Served, Tensor, Tensor], Tensor], dynamic: bool, tmp_path: Path) -> None:
    """Both directions read them in place, and their gradients are summed by adapter at once."""
    model, twin = Served(written), Served(written, torch.float64)
    twin.load_state_dict(model.state_dict())
    options = OPTIONS | {"dump_ir": str(tmp_path)}
    step = torch.compile(model, backend="sparse", fullgraph=True, dynamic=dynamic, options=options)
    for sequences in (6, 3):
        x = torch.randn(sequences, 5, 32, requires_grad=True)
        ids = torch.randint(0 if written is stored_transposed else -10, 10, (sequences,))  # index_select counts from 0
        with collect() as found:
            got = torch.autograd.grad(step(x, ids).square().sum(), [x, model.down, model.up])
        if sequences == 6:
            assert in_place(found.decisions) == 4
        wide = x.detach().double().requires_grad_()
        expected = torch.autograd.grad(twin(wide, ids).square().sum(), [wide, twin.down, twin.up])
        for one, other in zip(got, expected, strict=True):
            close(one, other, 1e-5)
    text = min(tmp_path.glob("*graph_many-adapters.py")).read_text()
    assert text.count("routed_product.default(") == 4 and text.count("routed_outer.default(") == 2
    assert "aten.bmm" not in text and "index_put" not in text


def test_a_nan_in_training_reaches_the_adapter_of_its_sequence_alone() -> None:
    model, x, ids = Served(bmm), torch.randn(3, 5, 32), torch.tensor([4, 7, 4])
    x[1, 2, 3] = float("nan")
    y = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS)(x, ids)
    got = torch.autograd.grad(y.square().sum(), [model.down, model.up])
    for each in got:
        assert each.isnan().flatten(1).any(1).nonzero().flatten().tolist() == [7]


def test_small_factors_are_copied_in_training() -> None:
    model, x, ids = Served(bmm), torch.randn(6, 5, 32), torch.randint(10, (6,))
    with collect() as found:
        y = torch.compile(model, backend="sparse", fullgraph=True, options=OPTIONS | {"min_gain": 1.1})(x, ids)
        got = torch.autograd.grad(y.square().sum(), [model.down, model.up])
    assert in_place(found.decisions) == 0
    torch.testing.assert_close(
        got, torch.autograd.grad(model(x, ids).square().sum(), [model.down, model.up]), rtol=1e-4, atol=1e-4
    )


def test_mixed_batches_of_peft_run_in_one_graph_if_the_inner_model_is_compiled(recwarn: pytest.WarningsRecorder) -> None:
    """peft registers hooks at each call, which Dynamo cannot trace; its layers list the sequences of each adapter."""
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 256)).requires_grad_(False)
    with torch.no_grad():
        for layer in (base[0], base[2]):
            layer.weight *= torch.rand_like(layer.weight) < 0.1
    config = peft.LoraConfig(r=8, target_modules=["0", "2"], init_lora_weights=False)
    model = peft.get_peft_model(base, config, adapter_name="first")
    model.add_adapter("second", config)
    model.eval()
    x, mixes = torch.randn(5, 32, 256), (["first", "second", "first", "__base__", "second"], ["second"] * 5)
    with torch.no_grad():
        expected = [model(x, adapter_names=names) for names in mixes]
        alone = [model(x[row : row + 1], adapter_names=[name])[0] for row, name in enumerate(mixes[0])]
        model.base_model.model.compile(backend="sparse", fullgraph=True, options={"strict": True, "dense": "eager"})
        with collect() as found:
            got = [model(x, adapter_names=names) for names in mixes]
    assert sum(each.sparse for each in found.decisions) == 2 * len(mixes)
    assert not [w for w in recwarn if "torch.compile" in str(w.message)]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(list(got[0]), alone, rtol=1e-4, atol=1e-5)
