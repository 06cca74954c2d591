"""Regions as C: a program in C that is linked with an exported model's calls computes what torch does, without Inductor."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import gossamer
from gossamer.backend.deploy import archive
from gossamer.backend.deploy.packages import called_in
from gossamer.backend.report.report import collect
from tests.backend.harness import prune_

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
OPTIONS = {"min_gain": 0, "strict": True}
MAIN = """
static Tensor read_tensor(FILE *file, int type, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t elements) {
  Tensor made;
  int64_t whole[] = {elements}, one[] = {1};
  if (aoti_torch_empty_strided(1, whole, one, type, 0, 0, &made)) abort();
  if (fread(address(made), BYTES[type], elements, file) != (size_t)elements) abort();
  made->rank = rank;
  for (int64_t d = 0; d < rank; d++) made->sizes[d] = sizes[d], made->strides[d] = strides[d];
  return made;
}

int main(int count, char **names) {
  int64_t header[2], rank, type, elements, sizes[RANK], strides[RANK];
  FILE *file = fopen(names[1], "rb"), *to = fopen(names[2], "wb");
  if (!file || !to || fread(header, 8, 2, file) != 2) return 2;
  Tensor given[header[0]], found[2] = {0};
  for (int64_t i = 0; i < header[0]; i++) {
    if (fread(&type, 8, 1, file) != 1 || fread(&rank, 8, 1, file) != 1 || fread(&elements, 8, 1, file) != 1) return 2;
    if (fread(sizes, 8, rank, file) != (size_t)rank || fread(strides, 8, rank, file) != (size_t)rank) return 2;
    given[i] = read_tensor(file, type, rank, sizes, strides, elements);
  }
  if (aoti_torch_cpu_exported(given, header[0], "KEY", found, found + 1)) return 1;
  int64_t written;
  aoti_torch_get_numel(found[0], &written);
  fwrite(address(found[0]), BYTES[found[0]->type], written, to);
  for (int64_t i = 0; i < header[0]; i++) aoti_torch_delete_tensor_object(given[i]);
  aoti_torch_delete_tensor_object(found[0]), aoti_torch_delete_tensor_object(found[1]);
  return fclose(to);
}
"""


def exported(model: nn.Module, *inputs: torch.Tensor, sparse: int, **named: Any) -> torch.export.ExportedProgram:
    """The program of a model with so many sparse layers."""
    with collect() as found:
        program = gossamer.export(model, inputs, options=OPTIONS, **named)
    assert sum(decision.sparse for decision in found.decisions) == sparse
    return program


def linked(program: torch.export.ExportedProgram, folder: Path) -> Path:
    """A program in C that calls the only region."""
    called = called_in(program.graph_module.graph)
    (key,) = called
    archive.archive(called, ("aoti.c", "tensors.c"), lambda _: MAIN.replace("KEY", key), folder)
    archive.run_tool(archive.compiler(), folder / "together.o", "-fopenmp", "-lm", "-o", folder / "main")
    return folder / "main"


def run(main: Path, operands: Sequence[torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The elements of the first result. Operands are passed with their strides."""
    numbers = {torch.float32: 6, torch.bfloat16: 15}
    given = torch.tensor([len(operands), 0]).numpy().tobytes()
    for each in operands:
        elements = each.untyped_storage().nbytes() // each.element_size()
        words = [numbers[each.dtype], each.dim(), elements, *each.shape, *each.stride()]
        given += torch.tensor(words).numpy().tobytes()
        given += each.detach().as_strided((elements,), (1,), 0).view(torch.uint8).numpy().tobytes()
    (main.parent / "in").write_bytes(given)
    subprocess.run([main, main.parent / "in", main.parent / "out"], check=True, timeout=60, capture_output=True)
    return torch.frombuffer(bytearray((main.parent / "out").read_bytes()), dtype=dtype)


def operands_of(program: torch.export.ExportedProgram, x: torch.Tensor) -> list[torch.Tensor]:
    """What the only region is called with, where the model does nothing to its input before."""
    found = list[torch.Tensor]()

    class Seen(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is torch.ops.gossamer.exported.default:
                found.extend(args[0])
            return super().call_function(target, args, kwargs)

    module = program.module(check_guards=False)
    with torch.no_grad():
        Seen(module).run(x)
    return found


@pytest.mark.parametrize("threads", [1, 3])
def test_a_chain_in_c_computes_what_torch_does(tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    torch.manual_seed(0)
    model = prune_(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48), nn.LayerNorm(48))).eval()
    program = exported(model, torch.randn(5, 64), sparse=2, dynamic_shapes=({0: Dim("batch", min=1, max=999)},))
    main = linked(program, tmp_path)
    for rows in (1, 2, 7, 130):
        x = torch.randn(rows, 64)
        found = run(main, operands_of(program, x)).view(rows, 48)
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)


def test_operands_that_do_not_lie_in_order_are_copied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = prune_(nn.Sequential(nn.Linear(64, 48))).eval()
    program = exported(model, torch.randn(6, 64), sparse=1)
    operands = operands_of(program, torch.randn(6, 64))
    operands[0] = torch.randn(64, 6).t()
    found = run(linked(program, tmp_path), operands).view(6, 48)
    torch.testing.assert_close(found, model(operands[0]), rtol=1e-4, atol=1e-5)


def test_attention_in_c_computes_what_torch_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = prune_(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, dropout=0.0)).eval()
    x = torch.randn(2, 5, 64)
    sizes = {0: Dim("batch", min=1, max=99), 1: Dim("tokens", min=1, max=99)}
    program = exported(Plain(model), x, sparse=4, dynamic_shapes=({**sizes},))
    if len(called_in(program.graph_module.graph)) != 1:
        pytest.skip("this machine's chains hold no attention")
    main = linked(program, tmp_path)
    for shape in ((2, 5, 64), (3, 17, 64), (1, 1, 64)):
        x = torch.randn(shape)
        torch.testing.assert_close(run(main, operands_of(program, x)).view(shape), model(x), rtol=1e-4, atol=1e-4)


class Plain(nn.Module):
    """A transformer's layer whose attention is written with torch.nn.functional, as graphs see it in training, too."""

    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer, attention = self.layer, self.layer.self_attn
        batch, length, width = x.shape
        projected = nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)
        q, k, v = (part.view(batch, length, attention.num_heads, -1).transpose(1, 2) for part in projected.split(width, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = layer.norm1(x + attention.out_proj(mixed))
        return layer.norm2(x + layer.linear2(nn.functional.relu(layer.linear1(x))))


def test_a_convolution_in_c_computes_what_torch_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()).eval()
    model[0].weight.data *= torch.rand_like(model[0].weight) < 0.2
    program = exported(model, torch.randn(2, 16, 9, 7), sparse=1, dynamic_shapes=({0: Dim("batch", min=1, max=99)},))
    main = linked(program, tmp_path)
    for images in (1, 4):
        x = torch.randn(images, 16, 9, 7)
        torch.testing.assert_close(run(main, operands_of(program, x)).view(images, 32, 9, 7), model(x), rtol=1e-4, atol=1e-4)


def test_a_processor_that_lacks_a_feature_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A leaf that no processor has.
    monkeypatch.setitem(archive.FEATURES, "telepathy", (0x7FFFFFFF, 0, 1, 5, 0))
    needed = archive.needed
    monkeypatch.setattr(archive, "needed", lambda target: [*needed(target), "telepathy"])
    model = prune_(nn.Sequential(nn.Linear(64, 48))).eval()
    program = exported(model, torch.randn(6, 64), sparse=1)
    main = linked(program, tmp_path)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run(main, operands_of(program, torch.randn(6, 64)))
    assert failed.value.returncode == 1
    assert b"and this processor lacks telepathy: export it" in failed.value.stderr


def test_every_feature_of_this_machine_that_is_looked_for_is_found(tmp_path: Path) -> None:
    text = archive.c_text({}, archive.Arrays(), ()) + "\nint main(void) { if (refused()) puts(refusal); return lacking; }\n"
    (tmp_path / "main.c").write_text(text)
    flags = ["-Wno-unused-function", "-fopenmp", "-x", "c"]
    archive.run_tool(archive.compiler(), *flags, tmp_path / "main.c", "-o", tmp_path / "main")
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
