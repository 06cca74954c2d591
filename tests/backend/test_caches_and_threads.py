"""Nothing compiled for one weight, backend or thread is served to another by mistake."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_cache
from torch.compiler._cache import CacheArtifactManager

from gossamer.backend import graph_cache
from gossamer.backend.devices.budget import Budget
from gossamer.backend.run import computed, region_op
from gossamer.backend.run.region_op import region
from gossamer.runtime import disk_cache
from tests.backend.harness import assert_same, compile_and_run, prune_, pruned


@contextmanager
def cached() -> Iterator[Path]:
    """New caches of torch, its AOTAutograd's included, and of ours, whose directory is given."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch, fresh_cache():
        patch.setenv("GOSSAMER_CACHE_DIR", directory)
        with functorch_config.patch(enable_autograd_cache=True):
            yield Path(directory)


def model_with(weight: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight.copy_(weight)
        model[0].bias.fill_(0.5)
    return model


def test_another_zero_pattern_and_another_backend_compile_for_themselves() -> None:
    x = torch.randn(5, 64)
    with fresh_cache():
        for weight, backends in ((pruned(48, 64), ("sparse", "inductor")), (torch.randn(48, 64), ("sparse",))):
            model = model_with(weight)
            for backend in backends:
                torch._dynamo.reset()
                counters.clear()
                if backend == "sparse":
                    run = compile_and_run(model, x, dense="inductor")
                    assert len(run.regions) == 1
                    output = run.output
                else:
                    with torch.no_grad():
                        output = torch.compile(model, backend=backend)(x)
                    assert counters["gossamer"]["regions"] == 0
                assert_same(output, model(x).detach())


def test_torch_finds_a_graph_again_and_we_its_regions() -> None:
    model, x = nn.Sequential(model_with(pruned(48, 64)), nn.Softmax(-1)).eval(), torch.randn(5, 64)
    with cached():
        for hits in (0, 1):
            torch._dynamo.reset()
            counters.clear()
            region_op._regions.clear()
            run = compile_and_run(model, x, dense="inductor")
            assert len(run.regions) == 1
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
            assert_same(run.output, model(x).detach())


def test_what_decisions_depend_on_is_part_of_the_key() -> None:
    x = torch.randn(5, 64)
    with cached():
        for weight, options in (
            (pruned(48, 64), {}),
            (pruned(48, 64), {}),
            (torch.randn(48, 64), {}),
            (pruned(48, 64), {"min_gain": 1e9}),
        ):
            torch._dynamo.reset()
            model = model_with(weight)
            run = compile_and_run(model, x, dense="inductor", regions=0 if options else 1, **options)
            assert counters["aot_autograd"]["autograd_cache_hit"] == 0
            assert len(run.regions) == (not options)
            assert_same(run.output, model(x).detach())


@pytest.mark.parametrize("damage", ["lost", "foreign"])
def test_a_graph_whose_regions_are_not_on_disk_is_compiled_again(damage: str) -> None:
    model, x = model_with(pruned(48, 64)), torch.randn(5, 64)
    with cached() as directory:
        for times in range(2):
            torch._dynamo.reset()
            region_op._regions.clear()
            run = compile_and_run(model, x, dense="inductor")
            assert len(run.regions) == 1
            assert_same(run.output, model(x).detach())
            for path in directory.glob("graph-*") if times == 0 else ():
                path.unlink()
                if damage == "foreign":
                    disk_cache.write(path.stem, disk_cache.Entry(b"no pickle", {}))


def test_training_is_found_again() -> None:
    model, x = model_with(pruned(48, 64)).train(), torch.randn(5, 64)
    expected = torch.autograd.grad(model(x).square().sum(), model[0].weight)[0]
    with cached():
        for hits in (0, 1):
            torch._dynamo.reset()
            counters.clear()
            region_op._regions.clear()
            run = compile_and_run(model, x, dense="inductor", grad=True)
            assert len(run.regions) == 1
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
            assert_same(torch.autograd.grad(run.output.square().sum(), model[0].weight)[0], expected)


def test_message_passing_is_found_again() -> None:
    def normalised(x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(edges.shape[1])).clamp(min=1)
        weight = degree.rsqrt()[source] * degree.rsqrt()[target]
        return torch.zeros_like(x).index_add(0, target, x[source] * weight[:, None])

    x, edges = torch.randn(20, 8), torch.randint(0, 20, (2, 90))
    given = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(normalised(given, edges).square().sum(), given)
    with cached():
        for hits in (0, 1):
            torch._dynamo.reset()
            counters.clear()
            computed._table.clear()
            run = compile_and_run(normalised, given, edges, dense="inductor", grad=True)
            assert [d.op for d in run.regions] == ["aggregation", "aggregation backward"]
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
            assert_same(torch.autograd.grad(run.output.square().sum(), given)[0], expected)


def test_attention_under_a_mask_of_positions_is_found_again() -> None:
    def windowed(q: torch.Tensor) -> torch.Tensor:
        places = torch.arange(q.shape[2])
        seen = (places[:, None] - places).abs() <= 20
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=seen)

    q = torch.randn(1, 1, 2100, 16)  # so long that the mask is made some queries at a time
    with cached():
        for hits in (0, 1):
            torch._dynamo.reset()
            counters.clear()
            computed._table.clear()
            run = compile_and_run(windowed, q, dense="inductor")
            assert [d.schedule for d in run.regions] == ["blocks"]
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
            assert_same(run.output, windowed(q))


def test_caches_on_disk_serve_the_next_process(tmp_path: Path) -> None:
    """It finds torch's code and ours, for one layer and for a chain, and loads no compiler, which takes most of a second: no
    MLIR, no passes, and none of what only sparse tensors need."""
    program = """
import sys, torch
from torch._dynamo.utils import counters
torch.manual_seed(0)
def pruned(k, m):
    linear = torch.nn.Linear(k, m)
    linear.weight.data[torch.rand(m, k) < 0.9] = 0
    return linear
one = torch.nn.Sequential(pruned(64, 48), torch.nn.Softmax(-1)).eval()
chain = torch.nn.Sequential(pruned(64, 48), torch.nn.LayerNorm(48), torch.nn.GELU(), pruned(48, 64)).eval()
x = torch.randn(40, 64)
with torch.no_grad():
    for m in one, chain:
        y = torch.compile(m, backend="sparse", fullgraph=True, options={"min_gain": 0, "dense": "inductor"})(x)
        torch.testing.assert_close(y, m(x))
compiler = ("torch_mlir", "gossamer.passes.weights", "gossamer.passes.pipelines", "gossamer.sparsity")
print(counters["gossamer"]["regions"], counters["aot_autograd"]["autograd_cache_hit"])
print(sorted({part for part in compiler if any(name.startswith(part) for name in sys.modules)}))
"""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "GOSSAMER_CACHE_DIR": str(tmp_path / "gossamer")}
    environment = {**os.environ, **caches}
    everything = ["gossamer.passes.pipelines", "gossamer.passes.weights", "gossamer.sparsity", "torch_mlir"]
    for expected in (f"3 0\n{everything}", "3 2\n[]"):
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip() == expected


def test_a_graph_is_stored_with_what_defines_its_operations() -> None:
    """The next process, which finds torch's code for it, would call operations that nobody has imported."""

    def chosen(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        mask = (q.sum(-1)[..., None] > 3) & (k.sum(-1)[..., None, :] > 3)
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    with cached() as directory:
        compile_and_run(chosen, *(torch.randn(2, 2, 256, 16) for _ in range(2)), dense="inductor", regions=1)
        (path,) = directory.glob("graph-*")
        entry = disk_cache.read(path.stem)
        assert entry is not None
        assert pickle.loads(entry.code).modules == ["gossamer.sparsity.attention.masked_attention"]


def test_a_graph_of_somebody_else_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forged:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "it ran",)

    name = f"graph-{'0' * 32}"
    for whose in ("theirs", "ours"):
        monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path / whose))
        disk_cache.write(name, disk_cache.Entry(pickle.dumps(Forged()), {}))
    shutil.copyfile(tmp_path / "theirs" / f"{name}.o", tmp_path / "ours" / f"{name}.o")
    assert graph_cache.recall("0" * 32) is None
    assert not (tmp_path / "it ran").exists()


def test_graphs_in_torchs_portable_cache_serve_another_user() -> None:
    """Who loads it says with that to trust it: the entries are then signed with their key."""
    model, x = nn.Sequential(model_with(pruned(48, 64)), nn.Softmax(-1)).eval(), torch.randn(5, 64)
    saved: tuple[bytes, object] | None = None
    for hits in (0, 1):
        with cached(), CacheArtifactManager.with_fresh_cache():
            if saved is not None:
                torch.compiler.load_cache_artifacts(saved[0])
            torch._dynamo.reset()
            counters.clear()
            region_op._regions.clear()
            run = compile_and_run(model, x, dense="inductor", regions=1)
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
            assert_same(run.output, model(x).detach())
            saved = torch.compiler.save_cache_artifacts()


def test_a_graph_that_cannot_be_stored_is_no_failure() -> None:
    class Unstorable:
        def __reduce__(self) -> str:
            raise ValueError("not this one")

    graph_cache.remember("0" * 32, graph_cache.Rewritten({}, {"0123": Unstorable()}, [], [], [], {}, lasting=True))
    assert not graph_cache.recall("0" * 32)


def test_an_unknown_region_says_so() -> None:
    try:
        region([torch.ones(2, 3), torch.ones(3, 3)], "0123")
    except Exception as error:
        assert "region 0123 was compiled by another process" in str(error)
    else:
        raise AssertionError("it ran")


def test_two_threads_compile_at_once() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            model = prune_(nn.Sequential(nn.Linear(64, 32 + 16 * seed), nn.GELU(), nn.Linear(32 + 16 * seed, 64))).eval()
            compiled = torch.compile(model, backend="sparse", options={"dense": "eager", "min_gain": 0})
            for _ in range(20):
                x = torch.randn(5, 64, generator=generator)
                with torch.no_grad():
                    assert_same(compiled(x), model(x))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_one_model_in_two_threads_while_its_weight_changes() -> None:
    weight = nn.Parameter(pruned(48, 64), requires_grad=False)
    model = nn.Linear(64, 48, bias=False).eval()
    model.weight = weight
    x, failures = torch.randn(5, 64), []
    run = compile_and_run(model, x)
    versions = [weight.detach() * scale for scale in range(1, 5)]
    valid = [x @ v.T for v in versions]
    stop = threading.Event()

    def read() -> None:
        with torch.no_grad():
            while not stop.is_set():
                y = run.function(x)
                columns = [any(torch.allclose(y[:, c], v[:, c], atol=1e-3) for v in valid) for c in range(48)]
                if not sum(columns) > 40:  # a few rows may be caught in the middle of a write
                    failures.append(y)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    with torch.no_grad():
        for i in range(50):
            weight.copy_(versions[i % 4])
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    with torch.no_grad():
        assert_same(run.function(x), model(x))


def test_a_graph_that_was_decided_on_a_busy_machine_is_decided_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a quiet one has settled it; torch's part of the first decision is never called with the regions of another."""
    model, x = nn.Sequential(model_with(pruned(48, 64)), nn.Softmax(-1)).eval(), torch.randn(5, 64)
    with cached():
        for settled, hits in ((False, 0), (False, 0), (True, 0), (True, 1), (False, 1)):
            monkeypatch.setattr("gossamer.backend.rewrite.Budget.of", lambda _, settled=settled: Budget(settled=settled))
            torch._dynamo.reset()
            counters.clear()
            region_op._regions.clear()
            run = compile_and_run(model, x, dense="inductor")
            assert len(run.regions) == 1
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
            assert_same(run.output, model(x).detach())


def test_a_machine_that_is_always_busy_is_believed_until_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_with(pruned(48, 64)), torch.randn(5, 64)
    busy = [True] * (graph_cache._MOST_TRIES + 3) + [False] * 2
    found = []
    with cached():
        for disturbed in busy:
            settled = not disturbed
            monkeypatch.setattr("gossamer.backend.rewrite.Budget.of", lambda _, settled=settled: Budget(settled=settled))
            monkeypatch.setattr(graph_cache, "quiet_now", lambda settled=settled: settled)
            torch._dynamo.reset()
            counters.clear()
            region_op._regions.clear()
            compile_and_run(model, x, dense="inductor")
            found.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert found == [0] * (graph_cache._MOST_TRIES + 1) + [1, 1] + [0, 1]
