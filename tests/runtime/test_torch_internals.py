"""torch's private names stand in one file; without any of them everything else works, and what needs it says that it is off."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.dialects.errors import GossamerError
from gossamer.runtime import torch_internals
from gossamer.runtime.torch_names import PRIVATE, STREAMS

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for room in ("gossamer", "backend", "sparsity", "passes", "dialects", "runtime")
    for path in (ROOT / room).rglob("*.py")
]


DOCUMENTED = {"torch._check"}
"""Names with an underscore that torch's documentation tells its users to take."""


def private_names(source: str) -> Iterator[str]:
    """Dotted paths of torch in a source that torch does not promise, under whatever name they were imported."""
    tree = ast.parse(source)
    meaning = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                meaning[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                meaning[alias.asname or alias.name] = path = f"{node.module}.{alias.name}"
                yield path
    for node in ast.walk(tree):
        names, inner = [], node
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if names and isinstance(inner, ast.Name) and inner.id in meaning:
            yield ".".join([meaning[inner.id], *reversed(names)])


def is_private(path: str) -> bool:
    first, *rest = path.split(".")
    if first != "torch" or rest[:1] == ["ops"] or path in DOCUMENTED:
        return False
    hidden = any(part.startswith("_") and not part.endswith("__") for part in rest)
    return hidden or rest[:2] == ["fx", "experimental"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_of_torch_stand_in_the_fence_alone(path: Path) -> None:
    assert not [name for name in private_names(path.read_text(encoding="utf-8")) if is_private(name)]


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch._inductor.config as c",
        "from torch._guards import detect_fake_mode",
        "from torch import _C",
        "from torch import fx\nfx.experimental.proxy_tensor",
        "def f():\n    from torch.fx.experimental import proxy_tensor",
        "import torch as t\nt.Tensor._make_wrapper_subclass()",
        "from torch.autograd import profiler as p\np._is_profiler_enabled",
    ],
)
def test_every_way_to_a_private_name_is_seen(source: str) -> None:
    assert any(map(is_private, private_names(source)))


def test_public_names_are_not_private() -> None:
    source = "import torch\nfrom torch import fx\ntorch.ops.aten._to_copy\ntorch.__version__\nfx.Graph\ntorch.compiler.reset()"
    assert not any(map(is_private, private_names(source)))


def test_every_entry_is_used() -> None:
    used = {name.rpartition(".")[2] for path in FILES for name in private_names(path.read_text(encoding="utf-8"))}
    assert PRIVATE.keys() <= used


@pytest.mark.parametrize("feature", sorted({each.feature for each in PRIVATE.values()} - {STREAMS}))
def test_this_torch_has_it(feature: str) -> None:
    assert torch_internals.off(feature) is None


FIRST = {each.feature: name for name, each in reversed(PRIVATE.items())}
"""A name of each feature: a process that has it not takes seconds."""

PROGRAM = """
import gc, os, sys, traceback, json, warnings
from dataclasses import replace
import torch, torch._inductor.compile_fx, torch_mlir.fx, llvmlite.binding, rich.console
from gossamer.runtime import torch_internals as fence, torch_names as names

torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2))  # what all of the processes load
torch.compiler.reset()
gc.collect()
gc.freeze()  # and what its processes share stays shared

IN_INDUCTOR = names.INDUCTOR, names.TRITON, names.MODES, names.CACHE, names.LIBRARIES, names.DIRECT_CALLS
NO_REGIONS = names.REGIONS, names.OP_BY_OP

def check(name):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] += "/" + name  # or what an earlier one has compiled would be found
    entry = fence.PRIVATE[name]
    feature = entry.feature
    if vars(fence).pop(name, None) is not None:  # torch was told of us with it
        for module in ("disk_cache", "records"):
            del sys.modules[f"gossamer.runtime.{module}"]
            delattr(sys.modules["gossamer.runtime"], module)
    fence.PRIVATE[name] = replace(entry, path=entry.path + "_that_is_gone")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import gossamer, gossamer.backend
        from gossamer.backend.report.report import collect
        torch.manual_seed(0)
        matrix = torch.randn(12, 12) * (torch.rand(12, 12) < 0.3)
        vector = torch.randn(12)
        if feature == names.SPARSE_TENSORS:
            refuses(lambda: gossamer.SparseTensor.from_dense(matrix), feature)
        else:
            sparse_tensors(gossamer.SparseTensor.from_dense(matrix), matrix, vector, feature)
        not_met = names.STREAMS, names.DDP, names.EXCHANGE, names.SHARDED, names.ANEW, names.WITHOUT_ZEROS, names.LOADED
        if feature in not_met:
            getattr(fence, name)
        linear = torch.nn.Linear(64, 48).eval()
        linear.weight.data[torch.rand(48, 64) < 0.9] = 0
        options = {"min_gain": 0, "dense": "auto" if feature in IN_INDUCTOR else "eager"}
        x = torch.randn(40, 64)
        with torch.no_grad():
            with collect() as collected:
                output = torch.compile(linear, backend="sparse", options=options)(x)
            torch.testing.assert_close(output, linear(x))
    report = gossamer.Report(collected.decisions, off=fence.known_off())
    assert len(report.sparse) == (feature not in NO_REGIONS), report
    told = [str(each.message) for each in caught if str(each.message).startswith(f"gossamer: {feature}: off")]
    assert len(told) == 1 and "_that_is_gone" in told[0], [str(each.message) for each in caught]
    assert [each for each in report.off if each.startswith(f"{feature}: off")], report.off
    assert f"{feature}: off" in str(report)

def refuses(call, feature):
    from gossamer import GossamerError
    try:
        call()
    except GossamerError as error:
        assert str(error).startswith(f"{feature}: off"), error
    else:
        raise AssertionError(f"{feature} is not off")

def sparse_tensors(sparse, matrix, vector, feature):
    for _ in range(4):
        torch.testing.assert_close(sparse @ vector, matrix @ vector)
        with torch.no_grad():
            sparse.mul_(2), matrix.mul_(2)
    given = vector.clone().requires_grad_()
    (sparse @ given).square().sum().backward()
    torch.testing.assert_close(given.grad, 2 * matrix.T @ (matrix @ vector))
    differentiate = lambda: torch.func.grad(lambda v: (sparse @ v).square().sum())(vector)
    if feature == names.TRANSFORMS:
        refuses(differentiate, feature)
    else:
        torch.testing.assert_close(differentiate(), given.grad)

for name in sys.argv[1:]:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        failure = ""
        try:
            check(name)
        except BaseException:
            failure = traceback.format_exc()
        os.write(write, failure.encode()[-60000:])
        os._exit(0)
    os.close(write)
    with open(read) as told:
        failure = told.read()
    _, status = os.waitpid(child, 0)
    print("RESULT", json.dumps([name, failure or ("" if status == 0 else f"ended with {status}")]), flush=True)
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong in a process in which torch had not this name, for each of them."""
    directory = tmp_path_factory.mktemp("caches")
    own = {"TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"), "GOSSAMER_CACHE_DIR": str(directory / "gossamer")}
    environment = {**os.environ, **own, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", PROGRAM, *FIRST.values()], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    lines = (line.removeprefix("RESULT ") for line in run.stdout.splitlines() if line.startswith("RESULT "))
    return dict(map(json.loads, lines))


@pytest.mark.parametrize("name", FIRST.values())
def test_without_it_what_needs_it_is_off_and_says_so(name: str, without: dict[str, str]) -> None:
    assert without[name] == ""


@pytest.mark.parametrize("name", PRIVATE)
def test_the_stand_in_of_each_name_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    private = replace(PRIVATE[name], path=f"{PRIVATE[name].path}_that_is_gone")
    monkeypatch.setattr(torch_internals, "_off", {})
    with pytest.warns(UserWarning, match=f"gossamer: {re.escape(private.feature)}: off, because torch .*_that_is_gone"):
        found = torch_internals._found(private)
    if private.stand_in is None:
        with pytest.raises(GossamerError, match=re.escape(private.feature)):
            found()
    assert [each.partition(":")[0] for each in torch_internals.known_off()] == [private.feature]
