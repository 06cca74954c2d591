"""One kernel serves every number of tokens; layouts and sizes that are odd are served too."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import gossamer
from tests.backend.harness import assert_same, compile_and_run, prune_, pruned


@pytest.mark.parametrize("dense", ["eager", "inductor"])
def test_a_dynamic_batch_compiles_once(dense: str) -> None:
    model, graphs = prune_(nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 64))).eval(), []
    run = compile_and_run(model, torch.randn(3, 5, 64), dense=dense, dynamic=True)
    graphs = counters["gossamer"]["graphs"]
    for shape in ((2, 7, 64), (9, 2, 64), (4, 100, 64)):
        x = torch.randn(shape)
        with torch.no_grad():
            assert_same(run.function(x), model(x))
    assert counters["gossamer"]["graphs"] == graphs == 1


def test_recompiling_for_another_batch_uses_the_same_kernel() -> None:
    model = prune_(nn.Linear(64, 48)).eval()
    kernels = set()
    for tokens in (17, 18, 19):
        report = gossamer.explain(model, torch.randn(tokens, 64), options={"dense": "eager", "min_gain": 0})
        assert report.kernels == 1
        kernels |= {d.format for d in report.decisions}
    assert len(kernels) == 1


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_any_number_of_tokens(tokens: int) -> None:
    w, b, x = pruned(50, 70), torch.randn(50), torch.randn(tokens, 70)
    run = compile_and_run(lambda x: F.relu(F.linear(x, w, b)), x)
    assert len(run.regions) == 1
    assert_same(run.output, F.relu(F.linear(x, w, b)))


@pytest.mark.parametrize("m,k", [(1, 16), (16, 1), (1, 1), (3, 500), (500, 3), (17, 33)])
def test_any_weight_shape(m: int, k: int) -> None:
    w, x = pruned(m, k, density=0.5), torch.randn(5, k)
    run = compile_and_run(lambda x: F.linear(x, w), x)
    assert len(run.regions) == 1
    assert_same(run.output, F.linear(x, w))


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_tokens(shape: tuple[int, ...], dense: str) -> None:
    w, x = pruned(48, 64), torch.randn(shape)
    run = compile_and_run(lambda x: F.relu(F.linear(x, w)), x, dense=dense)
    assert run.output.shape == (*shape[:-1], 48)


@pytest.mark.parametrize("m,k", [(0, 64), (48, 0)])
def test_empty_weights_stay_dense(m: int, k: int) -> None:
    w, x = torch.zeros(m, k), torch.randn(5, k)
    run = compile_and_run(lambda x: F.linear(x, w), x, regions=0)
    assert_same(run.output, F.linear(x, w))


LAYOUTS = {
    "transposed": lambda: torch.randn(64, 6).T,
    "strided rows": lambda: torch.randn(12, 64)[::2],
    "strided columns": lambda: torch.randn(6, 128)[:, ::2],
    "expanded": lambda: torch.randn(1, 64).expand(6, 64),
    "offset": lambda: torch.randn(7 * 64)[64:].view(6, 64),
    "channels": lambda: torch.randn(2, 64, 3).transpose(1, 2),
}


@pytest.mark.parametrize("dense", ["eager", "inductor"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_x(layout: str, dense: str) -> None:
    w, x = pruned(48, 64), LAYOUTS[layout]()
    run = compile_and_run(lambda x: F.relu(F.linear(x, w)), x, dense=dense)
    assert len(run.regions) == 1
    assert_same(run.output, F.relu(F.linear(x, w)))


@pytest.mark.parametrize(
    "stored", [pruned(64, 48).T, pruned(96, 64)[::2], pruned(48, 128)[:, ::2], pruned(1, 64).expand(48, 64)]
)
def test_any_layout_of_the_weight(stored: Tensor) -> None:
    x = torch.randn(6, 64)
    run = compile_and_run(lambda x: F.linear(x, stored), x)
    assert len(run.regions) == 1
    assert_same(run.output, F.linear(x, stored))


def test_a_static_tensor_of_another_size_is_recompiled() -> None:
    class Holder:
        weight = pruned(48, 64)

        def __call__(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    holder, x = Holder(), torch.randn(5, 64)
    function = lambda x: holder(x)
    run = compile_and_run(function, x, dynamic=True)
    assert_same(run.output, holder(x))
    holder.weight = pruned(32, 64)
    assert_same(run.function(x), holder(x))


def test_regions_across_a_graph_break() -> None:
    first, second = prune_(nn.Linear(64, 48)), prune_(nn.Linear(48, 64))

    def function(x: Tensor) -> Tensor:
        y = first(x)
        torch._dynamo.graph_break()
        return second(y)

    x = torch.randn(5, 64)
    run = compile_and_run(function, x, fullgraph=False)
    assert [d.name for d in run.regions] == ["first.weight", "second.weight"]
    assert_same(run.output, function(x).detach())


def test_branches_and_loops_stay_dense_and_right() -> None:
    w = pruned(64, 64)

    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: F.linear(x, w), lambda x: x @ w, (x,)) + F.linear(x, w)

    x = torch.randn(5, 64)
    for dense in ("eager", "inductor"):
        torch._dynamo.reset()
        run = compile_and_run(function, x, dense=dense)
        assert len(run.regions) == 1
        assert_same(run.output, function(x))


def test_the_backend_is_called_by_name() -> None:
    graphs = CompileCounterWithBackend("sparse")
    model, x = prune_(nn.Linear(512, 512), 0.05).eval(), torch.randn(64, 512)
    with torch.no_grad():
        assert_same(torch.compile(model, backend=graphs, fullgraph=True)(x), model(x))
    assert graphs.frame_count == 1 and counters["gossamer"]["regions"] == 1
