"""gossamer.build: a model as a library that a program in C calls, without Python and PyTorch."""

import ctypes
import importlib
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import gossamer
from gossamer.backend import build
from gossamer.backend.deploy.archive import c_name, compiler, run_tool
from tests.backend.harness import prune_
from tests.backend.test_export import BATCH, OPTIONS, classifier

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
MAIN = """
#include "classifier.h"
#include <malloc.h>
#include <stdio.h>

static int64_t tokens[40 * 7];

int main(void) {
  classifier *model = classifier_load();
  if (!model) return puts(classifier_error()), 1;
  FILE *from = fopen("tokens", "rb"), *to = fopen("found", "wb");
  if (fread(tokens, 8, 40 * 7, from) != 40 * 7) return 2;
  classifier_tensor in[classifier_INPUTS] = {{.data = tokens, .type = classifier_INT64, .rank = 2, .sizes = {40, 7}}};
  classifier_tensor out[classifier_OUTPUTS];
  if (classifier_run(model, in, out) || out[0].rank != 2 || out[0].sizes[0] != 40 || out[0].sizes[1] != 48) return 3;
  fwrite(out[0].data, 4, 40 * 48, to);
  classifier_release(out);
  in[0].sizes[1] = 8;
  if (!classifier_run(model, in, out)) return 4;
  puts(classifier_error());
  classifier_free(model);
  in[0].sizes[0] = 1, in[0].sizes[1] = 7;
  size_t before = 0, after = 0;
  for (int n = 0; n < 1000; n++) {
    model = classifier_load();
    if (!model || classifier_run(model, in, out)) return 5;
    classifier_release(out), classifier_free(model);
    *(n < 100 ? &before : &after) = mallinfo2().uordblks;
  }
  printf("%d more bytes\\n", (int)(after - before));
  return fclose(to);
}
"""

OPENS = """
#include "small.h"
#include <dlfcn.h>
#include <stdio.h>

static float x[64 * 384];

int main(void) {
  for (int n = 0; n < 20; n++) {
    void *opened = dlopen("./small.so", RTLD_NOW);
    if (!opened) return puts(dlerror()), 1;
    small *(*load)(void) = (small * (*)(void)) dlsym(opened, "small_load");
    int (*run)(small *, const small_tensor *, small_tensor *) = (int (*)(small *, const small_tensor *, small_tensor *))
      dlsym(opened, "small_run");
    void (*release)(small_tensor *) = (void (*)(small_tensor *))dlsym(opened, "small_release");
    void (*done)(small *) = (void (*)(small *))dlsym(opened, "small_free");
    small *model = load();
    small_tensor in[small_INPUTS] = {{.data = x, .type = small_FLOAT32, .rank = 2, .sizes = {64, 384}}}, out[small_OUTPUTS];
    if (!model || run(model, in, out)) return 2;
    release(out), done(model), dlclose(opened);
  }
  return 0;
}
"""


def test_a_program_in_c_gets_what_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = classifier()
    header = gossamer.build(model, (tokens,), tmp_path / "classifier.so", dynamic_shapes=BATCH, options=OPTIONS)
    assert "in[0]  tokens: int64 [" in header.read_text()
    needed = subprocess.run(["ldd", tmp_path / "classifier.so"], capture_output=True, text=True).stdout
    assert "torch" not in needed and "python" not in needed
    (tmp_path / "main.c").write_text(MAIN)
    run_tool(compiler(), "-x", "c", tmp_path / "main.c", "-x", "none", tmp_path / "classifier.so", "-o", tmp_path / "main")
    given = torch.randint(50, (40, 7))
    (tmp_path / "tokens").write_bytes(given.numpy().tobytes())
    done = subprocess.run([tmp_path / "main"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stdout)
    found = torch.frombuffer(bytearray((tmp_path / "found").read_bytes()), dtype=torch.float32).view(40, 48)
    torch.testing.assert_close(found, model(given), rtol=1e-4, atol=1e-5)
    refusal, leaked = done.stdout.splitlines()
    assert refusal.startswith("in[0], tokens, is no int64 [") and refusal.endswith(", 7]")
    assert int(leaked.split()[0]) < 4096
    torch.testing.assert_close(_called_from_python(tmp_path / "classifier.so", given, monkeypatch), found)


class Placed(nn.Module):
    """A sparse layer, and a buffer that is not contiguous. It returns one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = prune_(nn.Linear(192, 96))
        self.register_buffer("places", torch.randn(192, 8).t())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.softmax(self.linear(torch.relu(x + self.places)), -1)
        return y, y


class Slot(ctypes.Structure):
    """A tensor as the header declares it."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("type", ctypes.c_int), ("rank", ctypes.c_int), ("sizes", ctypes.c_int64 * 8),
        ("owner", ctypes.c_void_p),
    ]  # fmt: skip


@torch.no_grad()
def test_a_library_reads_contiguous_inputs_and_constants_of_any_strides(tmp_path: Path) -> None:
    """The example is a slice. The file's name is none in C. Each of two equal results has its own handle."""
    torch.manual_seed(0)
    model, example, x = Placed().eval(), torch.randn(8, 16, 192)[:, 0], torch.randn(8, 192)
    header = gossamer.build(model, (example,), tmp_path / "my modèle.so", options=OPTIONS)
    assert header == tmp_path / "my modèle.h" and "my_mod_le_run" in header.read_text()
    library = ctypes.CDLL(str(header.with_suffix(".so")))
    library.my_mod_le_load.restype = ctypes.c_void_p
    given, out = Slot(x.data_ptr(), 6, 2, (8, 192)), (Slot * 2)()
    assert not library.my_mod_le_run(ctypes.c_void_p(library.my_mod_le_load()), ctypes.byref(given), out)
    assert out[0].owner != out[1].owner
    for each in out:
        found = torch.frombuffer(bytearray(ctypes.string_at(each.data, 8 * 96 * 4)), dtype=torch.float32).view(8, 96)
        torch.testing.assert_close(found, model(x)[0], rtol=1e-4, atol=1e-5)
    library.my_mod_le_release(out)
    assert out[0].owner is None and out[1].owner is None


def _called_from_python(library: Path, given: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What the example's class gets from a library."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    found = importlib.import_module("sources.c_library").Library(library)(given.numpy())
    return torch.from_numpy(found)


def test_what_only_libtorch_has_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int aoti_torch_cpu_addmm_out(void); int f(void) { return aoti_torch_cpu_addmm_out(); }")
    run_tool(compiler(), "-shared", "-fPIC", "-x", "c", tmp_path / "a.c", "-o", tmp_path / "a.so")
    with pytest.raises(gossamer.CompileError, match="a part of the model needs PyTorch: addmm_out"):
        build._check(tmp_path / "a.so")


def test_a_model_that_takes_no_tensor_is_refused(tmp_path: Path) -> None:
    class Power(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, tokens: torch.Tensor, times: int) -> torch.Tensor:
            return self.layer(tokens) * times

    model, tokens = classifier()
    with pytest.raises(gossamer.CompileError, match="takes and gives tensors, and times is"):
        gossamer.build(Power(model).eval(), (tokens, 2), tmp_path / "power.so", options=OPTIONS)


def test_a_library_has_another_ending(tmp_path: Path) -> None:
    with pytest.raises(gossamer.CompileError, match=r"must end in \.so"):
        gossamer.build(*classifier()[:1], (torch.zeros(1, 7),), tmp_path / "model.dll")


def test_names_of_files_become_names_in_c() -> None:
    assert [c_name(each) for each in ("mini-lm.v2", "2nd", "model", "modèle")] == ["mini_lm_v2", "nd", "model", "mod_le"]
    assert [c_name(each) for each in ("switch", "class", "tensor")] == ["switch_model", "class_model", "tensor_model"]


def test_a_program_opens_and_closes_the_library(tmp_path: Path) -> None:
    """Threads of OpenMP outlive it."""
    gossamer.build(prune_(nn.Linear(384, 1536)).eval(), (torch.randn(64, 384),), tmp_path / "small.so", options=OPTIONS)
    (tmp_path / "main.c").write_text(OPENS)
    run_tool(compiler(), "-x", "c", tmp_path / "main.c", "-o", tmp_path / "main", "-ldl")
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([tmp_path / "main"], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, (done.returncode, done.stdout)
