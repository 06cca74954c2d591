"""Sparse models on disk: they come back bit by bit, are small, and what is broken or foreign is refused."""

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gossamer
from gossamer import FormatError, OptionError
from gossamer.sparsity.checkpoints.encodings import decoded, encoded


def pruned(rows: int, columns: int, density: float, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    kept = torch.rand(rows, columns, generator=generator) < density
    return torch.where(kept, torch.randn(rows, columns, generator=generator), 0).to(dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.1, 0.5])
@pytest.mark.parametrize("shape", [(64, 96), (7, 13), (1, 4000)])
@pytest.mark.parametrize("deflate", [False, True])
def test_encodings_lose_nothing(deflate: bool, shape: tuple[int, int], density: float, dtype: torch.dtype) -> None:
    dense = pruned(*shape, density, dtype)
    arrays = encoded(dense, deflate)
    if arrays is None:  # a few bytes more than dense
        assert dense.numel() < 100
        return
    assert bits(decoded("w", arrays)) == bits(dense)


def test_nan_and_infinity_are_kept() -> None:
    dense = torch.zeros(40, 40)
    dense[0, :3] = torch.tensor([float("nan"), -float("inf"), 1e-45])
    arrays = encoded(dense)
    assert arrays is not None
    assert bits(decoded("w", arrays)) == bits(dense)


def test_a_tenth_of_nonzeros_takes_an_eighth() -> None:
    dense = pruned(768, 3072, 0.1)
    arrays = encoded(dense)
    assert arrays is not None
    assert sum(array.nbytes for array in arrays.values()) <= 0.13 * dense.nbytes


def test_deflated_a_tenth_of_int8_takes_a_twentyfifth_of_floats(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(768, 3072, bias=False))
    with torch.no_grad():
        weight = pruned(3072, 768, 1.0)
        model[0].weight.copy_(weight * (weight.abs() > 1.645))  # a tenth of normal numbers
    gossamer.quantize(model)
    wanted = model[0].weight_int8.clone()
    assert gossamer.save(model, tmp_path / "small", deflate=True) <= 0.04 * 4 * wanted.numel()
    model[0].weight_int8.zero_()
    gossamer.load(model, tmp_path / "small")
    assert torch.equal(model[0].weight_int8, wanted)


@pytest.mark.parametrize(
    ("part", "stream", "problem"),
    [
        ("gaps", b"no stream", "cannot be unpacked"),
        ("gaps", zlib.compress(b"\0" * 1000)[:-6], "end early"),
        ("values", zlib.compress(b"\0" * 100_000), "more than a tensor of 400 elements"),
        ("values", zlib.compress(b"\0" * 7), "are no elements"),
        ("values", zlib.compress(b"\0" * 8), "2 values for 40 places"),
    ],
)
def test_deflated_nonsense_is_refused(part: str, stream: bytes, problem: str) -> None:
    dense = torch.zeros(20, 20)
    dense[3:5] = 1
    arrays = encoded(dense, deflate=True)
    assert arrays is not None
    arrays[f"deflated_{part}"] = torch.frombuffer(bytearray(stream), dtype=torch.uint8)
    with pytest.raises(FormatError, match=problem):
        decoded("w", arrays)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))
        with torch.no_grad():
            self.inner.weight.copy_(pruned(48, 16, 0.1))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    size = gossamer.save(Tied(), path)
    assert size == path.stat().st_size
    return path


@pytest.mark.parametrize("place", ["cpu", "meta", "packed"])
def test_round_trip(file: Path, place: str) -> None:
    torch.manual_seed(0)
    saved = Tied()
    torch.manual_seed(1)
    model = Tied()
    if place == "packed":
        model = gossamer.prepare(model, free_dense=True)
    if place == "meta":
        with torch.device("meta"):
            model.inner, model.steps = nn.Linear(16, 48), torch.tensor(0)
    state = gossamer.load(model, file).state_dict()
    for name, value in saved.state_dict().items():
        assert torch.equal(state[name], value), name
    assert model.head.weight is model.embed.weight


def test_a_bitmask_of_compressed_tensors_is_read(tmp_path: Path) -> None:
    """As its README describes it: nonzeros, a bit an element and row offsets; in a folder, in two files."""
    dense, bias = pruned(6, 20, 0.4), torch.ones(6)
    mask = dense != 0
    counts = mask.sum(1)
    arrays = {
        "weight.compressed": dense[mask],
        "weight.bitmask": torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little")),
        "weight.shape": torch.tensor(dense.shape),
        "weight.row_offsets": counts.cumsum(0) - counts,
    }
    save_file(arrays, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"bias": bias}, tmp_path / "model-00002-of-00002.safetensors")
    layer = gossamer.load(nn.Linear(20, 6), tmp_path)
    assert torch.equal(layer.weight, dense) and torch.equal(layer.bias, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("format", ["sparse-bitmask", "sparse-24-bitmask"])
@pytest.mark.parametrize("name", ["", "0"])
def test_what_compressed_tensors_writes_is_read(name: str, format: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The arrays of compressed-tensors 0.11: they have the name of the layer, without "weight". In a 2:4 weight two of four are
    kept whatever they are, their values are a matrix, and the shape is a column."""
    dense = pruned(6, 20, 0.4).to(dtype)
    groups = torch.zeros(30, 4, dtype=torch.bool).scatter_(1, dense.float().view(-1, 4).abs().topk(2).indices, True)
    two_four = format == "sparse-24-bitmask"
    mask = groups.view(6, 20) if two_four else dense.float() != 0
    dense = (dense.float() * mask).to(dtype)
    values = dense.view(torch.uint8)[mask].view(dtype) if dtype.itemsize == 1 else dense[mask]
    prefix = f"{name}." if name else ""
    arrays = {
        f"{prefix}compressed": values.view(6, 10) if two_four else values,
        f"{prefix}bitmask": torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little")),
        f"{prefix}shape": torch.tensor([[6], [20]]) if two_four else torch.tensor([6, 20]),
        f"{prefix}bias": torch.ones(6, dtype=dtype),
    }
    if not two_four:
        arrays[f"{prefix}row_offsets"] = mask.sum(1).cumsum(0) - mask.sum(1)
    save_file(arrays, tmp_path / "model.safetensors")
    layer = nn.Linear(20, 6)
    gossamer.load(nn.Sequential(layer) if name else layer, tmp_path / "model.safetensors")
    assert torch.equal(layer.weight, dense.float()) and torch.equal(layer.bias, torch.ones(6))


def test_broken_files_are_refused(file: Path, tmp_path: Path) -> None:
    whole, broken = file.read_bytes(), tmp_path / "broken.safetensors"
    for content in (b"", b"no", whole[:100], whole[:-10]):
        broken.write_bytes(content)
        with pytest.raises(FormatError, match=r"broken\.safetensors"):
            gossamer.load(Tied(), broken)
    with pytest.raises(FormatError, match="no safetensors file"):
        gossamer.load(Tied(), tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("gaps", lambda a: a[:-1], "values for"),
        ("gaps", lambda a: a + 100, "places in a tensor of"),
        ("gaps", lambda a: a.to(torch.int32), "must be bytes"),
        ("values", lambda a: a[:-2], "values for"),
        ("values", lambda a: a.to(torch.int32), "in this model"),
        ("shape", lambda a: a.flip(0), "has shape"),
        ("shape", lambda a: -a, "has shape"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(file: Path, part: str, change, said: str) -> None:  # type: ignore[no-untyped-def]
    arrays = load_file(file)
    name = f"inner.weight.{part}"
    arrays[name] = change(arrays[name]).contiguous()
    save_file(arrays, file)
    with pytest.raises(FormatError, match=said) as refusal:
        gossamer.load(Tied(), file)
    assert str(refusal.value).count(str(file)) == 1


def test_files_of_other_models_and_versions_are_refused(file: Path) -> None:
    model = nn.Linear(3, 3)
    before = model.weight.clone()
    with pytest.raises(FormatError, match="missing: bias"):
        gossamer.load(model, file)
    assert torch.equal(model.weight, before)
    save_file(load_file(file), file, {"gossamer": '{"version": 99, "tied": {}}'})
    with pytest.raises(FormatError, match="version 99"):
        gossamer.load(Tied(), file)


def test_a_place_that_is_none_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(OptionError, match=r"there is no folder .*absent: give the path of a file"):
        gossamer.save(model, tmp_path / "absent" / "model.safetensors")
    with pytest.raises(OptionError, match=r"is a folder: give the path of a file"):
        gossamer.save(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_masks_are_refused(tmp_path: Path) -> None:
    model = gossamer.sparsify(nn.Sequential(nn.Linear(8, 8)), "magnitude", density=0.5)
    with pytest.raises(OptionError, match="finalize"):
        gossamer.save(model, tmp_path / "x.safetensors")


@pytest.mark.parametrize("integers", [False, True])
def test_tied_and_shared_layers_stay_so_on_meta(tmp_path: Path, integers: bool) -> None:
    def make() -> nn.ModuleDict:
        inner, embed = nn.Linear(16, 16), nn.Embedding(20, 16)
        model = nn.ModuleDict({"embed": embed, "first": inner, "second": inner, "head": nn.Linear(16, 20, bias=False)})
        model["head"].weight = embed.weight
        return model

    saved = make()
    with torch.no_grad():
        saved["first"].weight.copy_(pruned(16, 16, 0.1))
    if integers:
        gossamer.quantize(saved, only="first")
    gossamer.save(saved, tmp_path / "x.safetensors")
    with torch.device("meta"):
        on_meta = make()
    for model in (on_meta, make()):
        state = gossamer.load(model, tmp_path / "x.safetensors").state_dict()
        assert all(torch.equal(state[name], value) for name, value in saved.state_dict().items())
        assert model["head"].weight is model["embed"].weight and model["first"] is model["second"]


def test_what_no_file_has_is_said(tmp_path: Path) -> None:
    class Rotary(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("angles", torch.arange(4.0), persistent=False)

    gossamer.save(Rotary(), tmp_path / "x.safetensors")
    with torch.device("meta"):
        model = Rotary()
    with pytest.warns(UserWarning, match="angles is still on the meta device"):
        gossamer.load(model, tmp_path / "x.safetensors")
    assert not model.weight.is_meta


def test_parametrizations_that_are_no_masks_are_saved_as_they_are(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4))

    saved, model = make(), make()
    gossamer.save(saved, tmp_path / "x.safetensors")
    gossamer.load(model, tmp_path / "x.safetensors")
    x = torch.randn(3, 8)
    assert torch.equal(model(x), saved(x))


class Scaled(nn.Linear):
    """Has extra state, as layers of Transformer Engine."""

    scale = torch.ones(1)

    def get_extra_state(self) -> Tensor:
        return self.scale

    def set_extra_state(self, state: Tensor) -> None:
        self.scale = state


def test_layers_get_their_extra_state_and_lists_of_weights(tmp_path: Path) -> None:
    """A recurrent layer reads its weights from a list, which must follow new parameters."""
    make = lambda: nn.ModuleList([Scaled(8, 8), nn.LSTM(8, 4)])
    with torch.device("meta"):
        model = make()
    saved, x = make(), torch.randn(2, 8)
    saved[0].scale = torch.tensor([3.0, 2.0])  # of any size
    gossamer.save(saved, tmp_path / "x.safetensors")
    gossamer.load(model, tmp_path / "x.safetensors")
    assert torch.equal(model[0].scale, saved[0].scale)
    assert torch.equal(model[1](x)[0], saved[1](x)[0])


def test_tensors_of_many_dimensions_and_views_of_conjugates_come_back(tmp_path: Path) -> None:
    """A conjugate has the memory of its tensor, but other values."""
    model, numbers = nn.ParameterList([pruned(32, 32, 0.05).view([2] * 10)]), torch.randn(3, dtype=torch.complex64)
    model.register_buffer("numbers", numbers)
    model.register_buffer("conjugates", numbers.conj())
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gossamer.save(model, tmp_path / "x.safetensors")
    for tensor in model.state_dict().values():
        tensor.zero_()
    model.register_buffer("conjugates", torch.zeros_like(numbers))
    state = gossamer.load(model, tmp_path / "x.safetensors").state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("head", "said"), [(nn.Linear(16, 40, bias=False), "has shape"), (nn.Linear(16, 20), "int64")])
def test_a_model_is_unchanged_if_a_late_tensor_does_not_fit(head: nn.Linear, said: str, tmp_path: Path) -> None:
    """A tied head of another size, or integers for floats."""
    saved = nn.ModuleDict({"embed": nn.Embedding(20, 16), "head": nn.Linear(16, 20, bias=head.bias is not None)})
    saved["head"].weight = saved["embed"].weight
    if head.bias is not None:
        saved["head"].bias = nn.Parameter(torch.arange(20), requires_grad=False)
    gossamer.save(saved, tmp_path / "x.safetensors")
    model = nn.ModuleDict({"embed": nn.Embedding(20, 16), "head": head})
    before = model["embed"].weight.clone()
    with pytest.raises(FormatError, match=said):
        gossamer.load(model, tmp_path / "x.safetensors")
    assert torch.equal(model["embed"].weight, before)
