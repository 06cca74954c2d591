"""Whole models through gossamer.export: types, layouts, copies, sizes and numbers that are none."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import gossamer
from gossamer.backend.report.report import collect
from tests.backend.harness import prune_
from tests.backend.packages import check_in_a_fresh_process, run_apart
from tests.backend.test_export import calls
from tests.backend.test_quantized import quantized_model

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
OPTIONS = {"min_gain": 0, "strict": True}
BATCH = ({0: Dim("batch", min=0, max=999)},)


def perceptron(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return prune_(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48))).eval().to(dtype)


def exported(model: nn.Module, x: Tensor, **named: object) -> torch.export.ExportedProgram:
    with collect() as found:
        program = gossamer.export(model, (x,), options=OPTIONS, **named)  # type: ignore[arg-type]
    assert calls(program) and any(each.sparse for each in found.decisions)
    return program


@pytest.mark.parametrize("batch", [0, 1, 2, 17, 131])
def test_batches_of_any_size_go_through_one_program(batch: int) -> None:
    model, x = perceptron(), torch.randn(batch, 64)
    found = exported(model, torch.randn(5, 64), dynamic_shapes=BATCH).module()(x)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_stay_in_their_row_and_are_those_of_the_compiled_model(number: float) -> None:
    model, x = perceptron(), torch.randn(5, 64)
    x[2, 7] = number
    with torch.no_grad():
        compiled = torch.compile(model, backend="sparse", options={**OPTIONS, "dense": "eager"})(x)
        found, expected = exported(model, torch.randn(5, 64)).module()(x), model(x)
    torch.testing.assert_close(found, compiled, rtol=1e-4, atol=1e-6, equal_nan=True)
    others = [0, 1, 3, 4]
    torch.testing.assert_close(found[others], expected[others], rtol=1e-4, atol=1e-5)
    assert not found[2].isfinite().all()


def test_a_model_in_bf16_is_exported() -> None:
    model, x = perceptron(torch.bfloat16), torch.randn(5, 64, dtype=torch.bfloat16)
    found = exported(model, x).module()(x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), model.float()(x.float()), rtol=3e-2, atol=3e-2)


def test_a_model_of_integers_is_exported() -> None:
    model, x = quantized_model(), torch.randn(2, 9, 70)
    torch.testing.assert_close(exported(model, x).module()(x), model(x), rtol=1e-3, atol=1e-3)


def test_a_copy_of_a_model_is_exported_like_the_model() -> None:
    model, x = perceptron(), torch.randn(5, 64)
    programs = [exported(each, x).module() for each in (model, copy.deepcopy(model))]
    assert torch.equal(programs[0](x), programs[1](x))


def test_masks_are_applied_before_the_export() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48)).eval(), torch.randn(5, 64)
    model = gossamer.sparsify(model, "magnitude", density=0.2)
    torch.testing.assert_close(exported(model, x).module()(x), model(x), rtol=1e-4, atol=1e-5)


class Images(nn.Module):
    """Convolutions, pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 24, 1), nn.Linear(24, 10)
        prune_flat(self.first), prune_flat(self.second)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.relu(self.first(x))).mean((2, 3)))  # type: ignore[no-any-return]


@torch.no_grad()
def prune_flat(layer: nn.Conv2d) -> None:
    layer.weight *= torch.rand_like(layer.weight) < 0.2


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_in_either_layout_are_exported(channels_last: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model, x = Images().eval().to(memory_format=layout), torch.randn(2, 16, 9, 7).to(memory_format=layout)
    program = exported(model, x, dynamic_shapes=({0: Dim("batch", min=1, max=99)},))
    other = torch.randn(3, 16, 9, 7).to(memory_format=layout)
    torch.testing.assert_close(program.module()(other), model(other), rtol=1e-4, atol=1e-4)
    if channels_last:
        check_in_a_fresh_process(program, model, [(x,), (other,)], tmp_path)


class Tokens(nn.Module):
    """Two results: images, and a layer over their pixels, which views them as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.rows = nn.Conv2d(3, 16, 3), nn.Linear(16, 8)
        prune_flat(self.images)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.images(x).relu()
        return self.rows(y.permute(0, 2, 3, 1).view(len(x), -1, 16)), y


def test_images_lie_in_a_program_as_they_do_in_the_model() -> None:
    torch.manual_seed(0)
    model = Tokens().eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 7).contiguous(memory_format=torch.channels_last)
    found, expected = exported(model, x).module()(x), model(x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert one.stride() == other.stride()


def test_transposed_convolutions_take_any_number_and_size_of_images() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 3, 2, 1, 1)).eval()
    prune_flat(model[0])
    prune_flat(model[2])
    sizes = {0: Dim("batch", min=1, max=99), 2: Dim("height", min=2, max=99), 3: Dim("width", min=2, max=99)}
    program = exported(model, torch.randn(2, 8, 5, 5), dynamic_shapes=(sizes,))
    assert calls(program) == 2
    for shape in ((2, 8, 5, 5), (3, 8, 5, 5), (1, 8, 6, 9)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-4)


class Branches(nn.Module):
    """A layer whose result decides between two branches, after a layer most of whose neurons are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = prune_(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48)))
        self.layers[0].weight.data[8:] = 0  # type: ignore[index,union-attr,operator]

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        found: Tensor = torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))
        return found


class Recomputed(nn.Module):
    """Layers that a gradient would compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return found


@pytest.mark.parametrize("kind", [Branches, Recomputed])
def test_graphs_inside_of_a_graph_stay(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(5, 64)
    with torch.no_grad():
        program = exported(model, x)
        for given in (x, -x, torch.randn(5, 64)):
            torch.testing.assert_close(program.module()(given), model(given), rtol=1e-4, atol=1e-5)


_POOLED = """
import sys, torch, gossamer
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.MaxPool2d(3, 2, 1), torch.nn.Conv2d(16, 8, 1)).eval()
for layer in (model[0], model[2]):
    layer.weight.data *= torch.rand_like(layer.weight) < 0.2
assert "torch._inductor.lowering" not in sys.modules
x = torch.randn(2, 8, 9, 9)
program = gossamer.export(model, (x,), options={"min_gain": 0, "strict": True})
torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-4)
print("exported")
"""


def test_a_process_that_has_compiled_nothing_exports_max_pools() -> None:
    """torch's decomposition of max pools reads a module of Inductor that it does not import."""
    assert "exported" in run_apart(_POOLED)
