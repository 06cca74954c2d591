"""Sparse tensors in state dicts: saved, loaded in a process that knows nothing of them yet, and between kinds of models."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gossamer
from gossamer import Format, FormatError, OptionError, SparseTensor

LAYOUTS = ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"]
Held = Callable[[Tensor], Tensor]


def pattern(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.3)


def in_layout(layout: str, dense: Tensor, **more: Any) -> Tensor:
    blocks = {"blocksize": (2, 2)} if "bs" in layout else {}
    return dense.to_sparse(layout=getattr(torch, layout), **blocks, **more)


class Graph(nn.Module):
    """A sparse tensor, as a parameter or a buffer, and a linear layer."""

    def __init__(self, a: Tensor, parameter: bool = False) -> None:
        super().__init__()
        if parameter:
            self.a = nn.Parameter(a)
        else:
            self.register_buffer("a", a)
        self.layer = nn.Linear(8, 8)


FRESH = """
import sys
import torch
{first}
assert not any("torch_mlir" in name or name == "gossamer.sparsity" for name in sys.modules)
state = torch.load(sys.argv[1], weights_only=True)
weight = state["weight"]
assert type(weight).__name__ == "SparseTensor" and weight.requires_grad
print(float(weight.detach().to_dense().sum()), sorted(state))
"""


@pytest.mark.parametrize("first", ["", "import gossamer"])
def test_a_checkpoint_loads_in_a_fresh_process(first: str, tmp_path: Path) -> None:
    """By the plug-in that torch looks for when it is imported: `pip install` puts it there."""
    assert "gossamer" in entry_points(group="torch.backends").names, "install the package anew: pip install -e . --no-deps"
    weight = nn.Parameter(SparseTensor.from_dense(pattern(0, 8, 8)))
    torch.save({"weight": weight, "steps": 3}, tmp_path / "state.pt")
    found = run(FRESH.format(first=first), tmp_path / "state.pt")
    assert found == f"{float(pattern(0, 8, 8).sum())} ['steps', 'weight']"


def test_a_checkpoint_loads_where_torch_loads_no_plug_ins(tmp_path: Path) -> None:
    torch.save({"weight": nn.Parameter(SparseTensor.from_dense(torch.eye(4)))}, tmp_path / "state.pt")
    program = FRESH.format(first="import gossamer")
    assert run(program, tmp_path / "state.pt", TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "4.0 ['weight']"


def test_a_plug_in_that_fails_leaves_torch_alone() -> None:
    program = """
import sys, types
sys.modules["gossamer.runtime"] = types.ModuleType("gossamer.runtime")  # where nothing is found
import torch
print(torch.ones(2).sum().item())
"""
    assert run(program) == "2.0"


def run(program: str, *arguments: object, **more: str) -> str:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **more})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("how", [{"map_location": "meta"}, {"map_location": "cpu"}, {"mmap": True}])
def test_ways_to_load_a_checkpoint(how: dict[str, Any], tmp_path: Path) -> None:
    model = Graph(SparseTensor.from_dense(pattern(0, 8, 8)))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True, **how)
    assert isinstance(state["a"], SparseTensor) and state["a"].shape == (8, 8) and state["a"].nnz == model.a.nnz
    if how == {"map_location": "meta"}:
        assert state["a"].device.type == "meta"
    else:
        assert torch.equal(state["a"].to_dense(), model.a.to_dense())
        other = Graph(SparseTensor.from_dense(torch.eye(8)))
        other.load_state_dict(state, assign=True)
        assert torch.equal(other.a.to_dense(), model.a.to_dense())


def test_a_checkpoint_whose_structure_is_broken_is_refused() -> None:
    file = io.BytesIO()
    positions = torch.tensor([0, 1, 9])
    bad = SparseTensor.from_parts(Format.CSR, (2, 2), positions, torch.zeros(9, dtype=torch.int64), torch.ones(9), check=False)
    torch.save(bad, file)
    file.seek(0)
    with pytest.raises(FormatError):
        torch.load(file, weights_only=True)


@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("into", ["plain", "prepared"])
@pytest.mark.parametrize("of", ["plain", "prepared"])
@pytest.mark.parametrize("seed", [1, 2], ids=["same pattern", "another pattern"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("by", ["state dict", "file"])
def test_plain_and_prepared_models_load_each_other(
    by: str, layout: str, seed: int, of: str, into: str, parameter: bool, tmp_path: Path
) -> None:
    if by == "state dict" and of == into == "plain" and seed == 2 and layout != "sparse_coo":
        pytest.skip("torch copies compressed layouts with as many entries alone")
    saved = Graph(in_layout(layout, pattern(seed, 8, 8)), parameter)
    model = Graph(in_layout(layout, pattern(1, 8, 8)), parameter)
    saved = gossamer.prepare(saved) if of == "prepared" else saved
    model = gossamer.prepare(model) if into == "prepared" else model
    kind, held = type(model.a), model.a
    if by == "state dict":
        model.load_state_dict(saved.state_dict())
    else:
        gossamer.save(saved, tmp_path / "model.safetensors")
        gossamer.load(model, tmp_path / "model.safetensors")
    assert type(model.a) is kind and model.a is held and model.a.requires_grad is parameter
    assert torch.equal(model.a.to_dense(), pattern(seed, 8, 8))
    assert (model.a.layout is getattr(torch, layout)) is (into == "plain")
    assert torch.equal(model.layer.weight, saved.layer.weight)


OTHER_SHAPES: list[Held] = [
    lambda a: a.to_sparse(1),
    lambda a: a.to_sparse(),
    lambda a: in_layout("sparse_csr", a, dense_dim=1),
    lambda a: in_layout("sparse_bsc", a, dense_dim=1),
    lambda a: torch.stack([a[0], a[0] * 2, a[0] * 3]).to_sparse_csr(),
    lambda a: torch.stack([a[0], a[0] * 2]).to_sparse_bsr((2, 4)),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("held", OTHER_SHAPES)
def test_hybrid_and_batched_ones_come_back(held: Held, dtype: torch.dtype, tmp_path: Path) -> None:
    saved = Graph(held(pattern(3, 4, 8, 8).to(dtype)))
    for prepare in (False, True):
        model = Graph(held(torch.eye(8).expand(4, 8, 8).to(dtype)))
        model = gossamer.prepare(model) if prepare else model
        gossamer.save(saved, tmp_path / "model.safetensors")
        gossamer.load(model, tmp_path / "model.safetensors")
        assert torch.equal(model.a.to_dense(), saved.a.to_dense()) and model.a.dtype == saved.a.dtype
        saved = gossamer.prepare(saved)


@pytest.mark.parametrize(
    "format",
    [Format.CSR, Format.CSC, Format.COO, Format.DCSR, Format.bsr(2, 4), Format.nm(2, 4), Format.CSR.with_widths(16, 8)],
)
def test_any_format_comes_back_with_the_zeros_that_it_stores(format: Format, tmp_path: Path) -> None:
    dense = gossamer.sparsify(pattern(4, 8, 8), "nm").to_dense()
    a = SparseTensor.from_dense(dense, format)
    with torch.no_grad():
        a.values().view(-1)[0] = 0
    saved = Graph(a)
    gossamer.save(saved, tmp_path / "model.safetensors")
    model = gossamer.load(Graph(SparseTensor.from_dense(torch.zeros(8, 8), format)), tmp_path / "model.safetensors")
    assert model.a.format == format and model.a.nnz == a.nnz
    for one, other in zip(model.a.components, a.components, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    other = gossamer.load(Graph(torch.zeros(8, 8)), tmp_path / "model.safetensors")
    assert torch.equal(other.a, a.to_dense()), "into a dense one"
    gossamer.save(other, tmp_path / "model.safetensors")
    assert torch.equal(gossamer.load(saved, tmp_path / "model.safetensors").a.to_dense(), other.a), "from a dense one"


@pytest.mark.parametrize("held", [SparseTensor.from_dense, Tensor.to_sparse, Tensor.to_sparse_csr, torch.zeros_like])
def test_a_model_on_the_meta_device_is_filled(held: Held, tmp_path: Path) -> None:
    dense = pattern(5, 8, 8)
    gossamer.save(Graph(held(dense), True), tmp_path / "model.safetensors")
    model = gossamer.load(Graph(held(dense), True).to("meta"), tmp_path / "model.safetensors")
    assert not model.a.is_meta and isinstance(model.a, nn.Parameter) and type(model.a.data) is type(held(dense))
    assert torch.equal(model.a.to_dense(), held(dense).to_dense())


def test_shared_sparse_tensors_are_stored_once(tmp_path: Path) -> None:
    def made(seed: int) -> nn.Module:
        model = Graph(SparseTensor.from_dense(pattern(seed, 64, 64)))
        model.register_buffer("same", model.a)
        model.register_buffer("coo", pattern(seed, 64, 64).to_sparse())
        model.register_buffer("same_coo", model.coo)
        return model

    gossamer.save(made(6), tmp_path / "model.safetensors")
    assert sum("values" in name or "sparse_format" in name for name in load_file(tmp_path / "model.safetensors")) == 2
    model = gossamer.load(made(7), tmp_path / "model.safetensors")
    for each in (model.a, model.same, model.coo, model.same_coo):
        assert torch.equal(each.to_dense(), pattern(6, 64, 64))


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("sparse_format", lambda a: a[:-1], "'a': "),
        ("sparse_format", lambda a: a.float(), "'a': "),
        ("sparse_format", lambda a: a + 128, "'a': "),
        ("sparse_shape", lambda a: a + 1, "has shape"),
        ("sparse_shape", lambda a: -a, "has shape"),
        ("sparse_0", lambda a: a + 1, "'a': "),
        ("sparse_0", lambda a: a[:-1], "'a': "),
        ("sparse_1", lambda a: a - 8, "'a': "),
        ("sparse_1", lambda a: a.float(), "'a': "),
        ("sparse_2", lambda a: a[:-1], "'a': "),
        ("sparse_2", lambda a: a.long(), "'a' is torch.int64, in this model torch.float32"),
        ("sparse_2", None, "'a': .*sparse_2"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(part: str, change: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    gossamer.save(Graph(SparseTensor.from_dense(pattern(8, 8, 8))), path)
    arrays = load_file(path)
    array = arrays.pop(f"a.{part}")
    if change is not None:
        arrays[f"a.{part}"] = change(array).contiguous()
    save_file(arrays, path)
    with pytest.raises(FormatError, match=said):
        gossamer.load(Graph(SparseTensor.from_dense(torch.eye(8))), path)


def test_other_kinds_of_state_are_refused_by_name(tmp_path: Path) -> None:
    class Counted(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"steps": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(OptionError, match="'_extra_state' is a dict: only dense tensors, SparseTensors"):
        gossamer.save(Counted(2, 2), tmp_path / "model.safetensors")


def test_a_sparse_tensor_is_copied_into_one_of_torch() -> None:
    source = SparseTensor.from_dense(pattern(9, 8, 8))
    for layout in LAYOUTS:
        out = in_layout(layout, pattern(10, 8, 8).double())
        assert out.copy_(source) is out
        assert out.dtype == torch.float64 and torch.equal(out.to_dense(), pattern(9, 8, 8).double())
        with pytest.raises(RuntimeError, match="broadcast shape"):
            out.copy_(SparseTensor.from_dense(torch.eye(4)))
        with pytest.raises(gossamer.GossamerError, match=r"under torch\.no_grad"):
            out.copy_(source.detach().requires_grad_())
    batch = torch.stack([torch.eye(4), torch.eye(4)]).to_sparse_csr()
    uneven = SparseTensor.from_dense(torch.stack([torch.eye(4), torch.ones(4, 4)]), Format.csf(3))
    with pytest.raises(FormatError, match="equally many entries in each matrix"):
        batch.copy_(uneven)
