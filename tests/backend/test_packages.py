"""Packages of AOTInductor with kernels inside: loaded by Python and C++, many times, and refused by other processors."""

import copy
import re
import subprocess
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.backend.build import _interface
from gossamer.backend.deploy import archive
from gossamer.backend.deploy.c_code import Arrays
from gossamer.dialects.errors import ArgumentError
from gossamer.runtime.packages.package_inputs import PackageInputs, described
from tests.backend.harness import prune_
from tests.backend.packages import run_apart
from tests.backend.test_export import BATCH, OPTIONS, calls, classifier

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
TORCH = Path(torch.__file__).parent
LOADED = """
import sys, torch
tokens, expected, path = *torch.load(sys.argv[1]), sys.argv[2]
model = torch._inductor.aoti_load_package(path)
assert not [name for name in sys.modules if name.startswith("gossamer")]
for batch, wanted in zip(tokens, expected, strict=True):
    torch.testing.assert_close(model(batch), wanted, rtol=1e-4, atol=1e-5)
print("all is there")
"""
LOADED_OFTEN = """
import sys, torch, gossamer
tokens, expected, path = *torch.load(sys.argv[1]), sys.argv[2]
pages = []
for _ in range(96):
    model = gossamer.load_package(path)
    found = model(tokens[0])
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
    del model
    pages.append(int(open("/proc/self/statm").read().split()[1]))
assert "wrapper.so" not in open("/proc/self/maps").read()
assert "torch._inductor" not in sys.modules, "loading asks a compiler"
assert (pages[-1] - pages[31]) * 4 < 64 * 40, pages  # 40 KB a load: a library that stays takes a megabyte
print("all is there")
"""
MAIN = """
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <cstdio>

int main(int, char **names) {
  c10::InferenceMode mode;
  torch::inductor::AOTIModelPackageLoader loader(names[1]);
  at::Tensor tokens = at::arange(40 * 7).remainder(50).view({40, 7});
  at::Tensor found = loader.run({tokens}).at(0).contiguous();
  FILE *file = std::fopen(names[2], "wb");
  std::fwrite(found.data_ptr(), sizeof(float), found.numel(), file);
  return std::fclose(file);
}
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of a classifier, beside what it gives for several batches."""
    folder = tmp_path_factory.mktemp("package")
    model, tokens = classifier()
    program = gossamer.export(copy.deepcopy(model), (tokens,), dynamic_shapes=BATCH, options=OPTIONS)
    assert calls(program) == 1
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    batches = [torch.randint(50, (batch, 7)) for batch in (3, 1, 40)]
    with torch.no_grad():
        torch.save((batches, [model(each) for each in batches]), folder / "expected.pt")
    return folder / "model.pt2"


def test_a_package_runs_where_gossamer_is_not_loaded(package: Path) -> None:
    assert "all is there" in run_apart(LOADED, package.with_name("expected.pt"), package)


def test_a_package_goes_when_nobody_holds_it(package: Path) -> None:
    assert "all is there" in run_apart(LOADED_OFTEN, package.with_name("expected.pt"), package)


@pytest.mark.parametrize("pruned", [True, False], ids=["pruned", "without zeros"])
def test_a_package_that_torch_exports_is_dense_and_gossamer_says_so_once(pruned: bool, tmp_path: Path) -> None:
    """Nothing is mocked: AOTInductor compiles the package, and it runs."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32)).eval(), torch.randn(5, 64)
    if pruned:
        prune_(model)
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        path = torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=str(tmp_path / "m.pt2"))
        found = torch._inductor.aoti_load_package(path)(x)
        expected = model.double()(x.double()).float()
    ours = [str(warning.message) for warning in said if "gossamer" in str(warning.message).lower()]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with zipfile.ZipFile(path) as package:
        code = "".join(package.read(name).decode() for name in package.namelist() if name.endswith(".cpp"))
    assert code and "gossamer" not in code, "the layers are dense products of torch"
    assert len(ours) == pruned, ours
    if pruned:
        assert "AOTInductor compiles 2 pruned weights ('0.weight', '2.weight') densely" in ours[0]


def test_a_package_takes_the_keywords_that_it_was_exported_with(tmp_path: Path) -> None:
    model, tokens = classifier()
    program = gossamer.export(model, (), {"tokens": tokens}, options=OPTIONS)
    loaded = gossamer.load_package(torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2")))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens=tokens), model(tokens), rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match=r"exported with the keywords \['tokens'\]"):
        loaded(tokens)


@pytest.fixture(scope="module")
def two_inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Callable[..., Any], Any]:
    """A model of 1 to 64 rows of a matrix and as many images, and its package, loaded."""
    model, batch = TwoInputs().eval(), torch.export.Dim("batch", min=1, max=64)
    given = torch.randn(8, 192), torch.randn(8, 4, 6, 5).to(memory_format=torch.channels_last)
    program = gossamer.export(copy.deepcopy(model), given, dynamic_shapes=({0: batch}, {0: batch}), options=OPTIONS)
    path = tmp_path_factory.mktemp("two") / "model.pt2"
    return model, gossamer.load_package(torch._inductor.aoti_compile_and_package(program, package_path=str(path)))


class TwoInputs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = torch.nn.Linear(192, 96), torch.nn.Conv2d(4, 3, 1)
        with torch.no_grad():
            self.linear.weight.mul_(torch.rand(96, 192) < 0.1)

    def forward(self, x: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x * 2), self.other(image).sum((2, 3))


@torch.no_grad()
def test_inputs_of_a_package_may_have_other_strides(two_inputs: tuple[Callable[..., Any], Any]) -> None:
    model, loaded = two_inputs
    for batch in (1, 3, 64):
        x, image = torch.randn(192, batch).t(), torch.randn(batch, 6, 4, 5).transpose(1, 2)
        for given in ((x, image), (x.contiguous(), image.contiguous()), (x[:, :1].expand(batch, 192), image)):
            for found, expected in zip(loaded(*given), model(*given), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_package_refuses_inputs_that_its_code_would_misread(two_inputs: tuple[Callable[..., Any], Any]) -> None:
    x, image = torch.ones(3, 192), torch.ones(3, 4, 6, 5)
    for given, message in (
        ([x], "of another structure"),
        ([x, 3], "for image: float32 [s"),
        ([torch.ones(3, 128), image], "for x: float32 [s"),
        ([x.double(), image], "gets float64 [3, 192] on cpu"),
        ([x[:, None], image], "gets float32 [3, 1, 192] on cpu"),
        ([torch.ones(65, 192), torch.ones(65, 4, 6, 5)], "to 64)"),
        ([x, torch.ones(4, 4, 6, 5)], "3 in this call"),
        ([x, image.to("meta")], "on meta"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(message)):
            two_inputs[1](*given)


class Batched(torch.nn.Module):
    """Takes a dictionary and an int."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = prune_(torch.nn.Linear(192, 96))

    def forward(self, batch: dict[str, Tensor], times: int) -> Tensor:
        return self.linear(batch["a"] * times) - batch["b"]


@torch.no_grad()
def test_a_package_of_slices_takes_other_strides_and_orders_of_keys_but_no_other_structure(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, a, rows = Batched().eval(), torch.randn(8, 16, 192), torch.randn(96, 8)
    example = {"a": a[:, 0], "b": rows[:, :1].t().expand(8, 96)}
    program = gossamer.export(model, (example, 3), options=OPTIONS)
    assert calls(program) == 1
    served = gossamer.load_package(torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2")))
    for given in (a[:, 1], a[:, 0].contiguous(), a[:1, 0].expand(8, 192), a[0, :8], torch.randn(192, 8).t()):
        expected = model({"a": given, "b": example["b"]}, 3)
        for batch in ({"a": given, "b": example["b"]}, {"b": example["b"], "a": given}):
            torch.testing.assert_close(served(batch, 3), expected, rtol=1e-4, atol=1e-4)
    for arguments, message in (
        ((example, 4), "exported for times = 3, and gets 4"),
        ((example, torch.tensor(3)), "times = 3, and gets a tensor"),
        (([a[:, 0], example["b"]], 3), "of another structure"),
        (({"a": a[:, 0], "c": example["b"]}, 3), "of another structure"),
        (({"a": a[:, 0], "b": rows.t()}, 3), "Elements of the example share memory"),
    ):
        with pytest.raises(ArgumentError, match=message):
            served(*arguments)


def test_sizes_that_are_multiples_of_others_are_checked() -> None:
    """By a package and by a library in C: twice the rows and one more, and a multiple of 8 whose eighth no input has."""

    class Multiples(torch.nn.Module):
        def forward(self, x: Tensor, pairs: Tensor, groups: Tensor) -> Tensor:
            return x.sum() + pairs.sum() + groups.view(-1, 8).sum()

    batch, eights = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("eights", min=1, max=4)
    sizes = ({0: batch}, {0: 2 * batch + 1}, {0: 8 * eights})
    given = torch.ones(5), torch.ones(11), torch.ones(24)
    program = torch.export.export(Multiples(), given, dynamic_shapes=sizes)
    inputs = PackageInputs(described(program.graph))
    assert inputs.checked(given) == list(given)
    for x, pairs, groups in ((3, 8, 8), (3, 7, 12), (3, 7, 40), (0, 0, 8), (65, 131, 8)):
        with pytest.raises(ArgumentError, match="was exported for"):
            inputs.checked([torch.ones(x), torch.ones(pairs), torch.ones(groups)])
    checks = _interface(program, "m").code({}, Arrays())
    assert "in[1].sizes[0] != 2 * ((in[0].sizes[0] - 0) / 1) + 1" in checks
    assert "((in[2].sizes[0] - 0) / 8) > 4 || (in[2].sizes[0] - 0) % 8" in checks


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        gossamer.load_package(tmp_path / "absent.pt2")
    (tmp_path / "other.pt2").write_bytes(b"text")
    torch.export.save(torch.export.export(nn.ReLU(), (torch.ones(3),)), tmp_path / "graph.pt2")
    for name in ("other.pt2", "graph.pt2"):
        with pytest.raises(ArgumentError, match="is no package"):
            gossamer.load_package(tmp_path / name)


def test_a_program_in_cpp_loads_a_package(package: Path, tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text(MAIN)
    includes = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    main = tmp_path / "main"
    archive.run_tool(archive.compiler(), "-std=c++20", "-O0", *includes, tmp_path / "main.cpp", *libraries, "-o", main)
    subprocess.run([main, package, tmp_path / "found"], check=True, timeout=300)
    found = torch.frombuffer(bytearray((tmp_path / "found").read_bytes()), dtype=torch.float32).view(40, 48)
    torch.testing.assert_close(found, _expected(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def _expected() -> Tensor:
    found: Tensor = classifier()[0](torch.arange(40 * 7).remainder(50).view(40, 7))
    return found


def test_a_processor_that_lacks_a_feature_is_refused_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A leaf that no processor has.
    monkeypatch.setitem(archive.FEATURES, "telepathy", (0x7FFFFFFF, 0, 1, 5, 0))
    needed = archive.needed
    monkeypatch.setattr(archive, "needed", lambda target: [*needed(target), "telepathy"])
    model, tokens = classifier()
    program = gossamer.export(model, (tokens,), options=OPTIONS)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    told = run_apart(REFUSED, package)
    assert "and this processor lacks telepathy: export it" in told


REFUSED = """
import sys, torch
sys.stderr = sys.stdout
import os
os.dup2(1, 2)
try:
    torch._inductor.aoti_load_package(sys.argv[1])
except RuntimeError as problem:
    print(problem)
else:
    raise AssertionError("it was loaded")
"""
