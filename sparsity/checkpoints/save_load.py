"""`gossamer.save` and `gossamer.load` write and read sparse models in safetensors files, whose size depends on the nonzeros."""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gossamer.dialects.errors import FormatError, OptionError
from gossamer.sparsity.checkpoints.encodings import BITMASK, DEFLATED, GAPS, decoded, encoded
from gossamer.sparsity.checkpoints.integer_layers import FloatExperts, FloatLayer, Shapes, in_integers, tensor_of
from gossamer.sparsity.checkpoints.scaled_integers import BESIDE, PACKED, SCALE, floats_of
from gossamer.sparsity.checkpoints.sparse_arrays import (
    ARRAY,
    FORMAT,
    SHAPE,
    arrays_of,
    as_held,
    as_sparse,
    sparse_tensor,
    stored_weights,
)
from gossamer.sparsity.pruning.mask import has_mask
from gossamer.sparsity.quantization.grouped_linear import GroupedLinear
from gossamer.sparsity.quantization.stored_tables import FloatTable, in_less_memory
from gossamer.sparsity.tensor.layouts import is_torch_sparse
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor
from gossamer.sparsity.torch_functions.check_model import check_model
from gossamer.sparsity.torch_functions.plain_model import plain_model, plain_name

Model = TypeVar("Model", bound=nn.Module)
_MARK, _VERSION = "gossamer", 1
_GROUPS = "weight_groups"
_EXTRA = "_extra_state"
"""The name in a state dict of what `get_extra_state` of a module returns."""


def save(model: nn.Module, path: str | os.PathLike[str], *, deflate: bool = False) -> int:
    """Writes a model's state dict to a safetensors file, and packs tensors with zeros. Returns the size of the file in bytes.

    - A tensor with zeros is stored as its nonzeros and their places: one bit for each element, or one byte for each nonzero,
      whichever is less. A dense f32 weight with 90 % zeros shrinks to 12.5 %.
    - `deflate=True` also packs both by zlib. The same weight shrinks to 10.6 %, and in int8 to 3.9 %. It takes longer to write
      and to read, and no other library reads it.
    - Weights of `store_sparse` are stored like others, and load into either kind. Other SparseTensors and torch.sparse tensors
      are stored with their arrays.
    - Tensors that share memory (tied weights) are stored once. Values are exact, but -0.0 may become 0.0.
    - Names are those of the model itself, even if torch.compile or DistributedDataParallel wraps it.

    OptionError for a model with masks (call `gossamer.finalize` first), and if the file cannot be written.
    """
    check_model(model)
    target = Path(path)
    if not target.parent.is_dir() or target.is_dir():
        what = f"{target} is a folder" if target.is_dir() else f"there is no folder {target.parent.absolute()}"
        raise OptionError(f"{what}: give the path of a file, such as 'model.safetensors', in a folder that exists")
    model = plain_model(model)
    masked = next((name for name, m in model.named_modules() if has_mask(m)), None)
    if masked is not None:
        raise OptionError(f"'{plain_name(masked)}' has a mask: gossamer.finalize(model) makes it plain first")
    arrays: dict[str, Tensor] = {}
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    weights = stored_weights(model)
    for own_name, tensor in model.state_dict().items():
        name = plain_name(own_name)
        if not isinstance(tensor, Tensor) or not (tensor.layout is torch.strided or is_torch_sparse(tensor)):
            kind = f"a tensor of layout {tensor.layout}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise OptionError(f"'{name}' is {kind}: only dense tensors, SparseTensors and torch.sparse tensors can be saved")
        place = _place(tensor)
        if tensor.numel() and place in first:
            tied[name] = first[place]
            continue
        first[place] = name
        if own_name in weights:
            tensor = tensor.to_dense()
        is_sparse = isinstance(tensor, SparseTensor) or is_torch_sparse(tensor)
        packed = arrays_of(tensor) if is_sparse else encoded(tensor, deflate)
        if packed is None:
            arrays[name] = tensor.detach().cpu().contiguous().clone()
        else:
            arrays |= {f"{name}.{part}": array.cpu() for part, array in packed.items()}
    unfinished = target.with_name(f"{target.name}.part")
    try:
        save_file(arrays, unfinished, {_MARK: json.dumps({"version": _VERSION, "tied": tied}), "format": "pt"})
        unfinished.replace(target)
    except (OSError, SafetensorError) as problem:
        unfinished.unlink(missing_ok=True)
        raise OptionError(f"{target} cannot be written: {problem}") from None
    return target.stat().st_size


def load(model: Model, path: str | os.PathLike[str]) -> Model:
    """Reads a file into a model of the same architecture, in place, and returns the model.

    It takes files of `gossamer.save`, files of compressed-tensors (llm-compressor, SparseML), plain safetensors files, and
    folders with several files. Of compressed-tensors it reads sparse-bitmask and sparse-24-bitmask. It also reads their
    quantized weights, as floats: pack-quantized, and int8 and fp8 with scales.

    The file is mapped into memory and unpacked one tensor at a time, so only the model and one weight are in memory. Parameters
    on the meta device get memory. Linear layers and experts become quantized ones, and tables stored ones, as in the file.

    FormatError if the file is broken, of a newer version, or of another model. Names and shapes are checked before anything
    changes.
    """
    check_model(model)
    whole = plain_model(model)
    own: dict[str, Tensor] = {plain_name(name): tensor for name, tensor in whole.state_dict(keep_vars=True).items()}
    modules = {plain_name(name): module for name, module in whole.named_modules(remove_duplicate=False)}
    with _opened(Path(path)) as files:
        stored, tied = _contents(files)
        stored = _with_scales(stored, own, files)
        stored = {_own_name(name, parts, own): parts for name, parts in stored.items()}
        shapes = {name: _shape(parts, files) for name, parts in stored.items()}
        # Layers are turned only after the file has been checked against their future shapes (`look`).
        known = shapes | {name: shapes[other] for name, other in tied.items() if other in shapes}
        turned: dict[str, FloatLayer | FloatExperts | FloatTable] = {
            **in_integers(modules, known),
            **in_less_memory(modules, known),
        }
        looks = {name: each.look() for name, each in turned.items()}
        for name, look in looks.items():
            for weight in turned[name].weights:
                del own[tensor_of(name, weight)]
            own |= _buffers(name, look)
        layers = {name: looks.get(name, layer) for name, layer in modules.items()}
        grouped = {name: layer for name, layer in layers.items() if isinstance(layer, GroupedLinear)}
        dtype_of = lambda name: _dtype(name, stored[name], files)
        _check(own, shapes, dtype_of, tied, path, {tensor_of(name, _GROUPS) for name in grouped})
        groups = _groups(grouped, stored, files)
        for each in {id(each.layer): each for each in turned.values()}.values():  # a layer may have several names
            each.become()
        grouped |= {name: layer for name in turned if isinstance(layer := modules[name], GroupedLinear)}
        for name, given in groups.items():
            grouped[name].make_room(given)
        for name in turned.keys() | groups.keys():
            own |= _buffers(name, modules[name])
        places = _places(modules)
        for name, parts in stored.items():
            _put(modules, places, name, own[name], _tensor(name, parts, files))
        for name, other in tied.items():
            of_new = all(each.rpartition(".")[0] in turned for each in (name, other))
            if own[name] is own[other]:
                continue
            if of_new and not isinstance(own[name], nn.Parameter) and own[name].shape == own[other].shape:
                _tie(modules, name, other)
            elif own[name].is_meta or _place(own[name]) != _place(own[other]):
                _put(modules, places, name, own[name], _tensor(other, stored[other], files))
    if left := [name for name, buffer in whole.named_buffers() if buffer.is_meta]:
        warnings.warn(
            f"{', '.join(left[:5])} {'are' if len(left) > 1 else 'is'} still on the meta device, because files have no "
            "buffers that are not persistent. Create only the parameters on meta, or compute these buffers again",
            stacklevel=2,
        )
    return model


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Returns a key for the memory of a tensor; of a sparse one, for the memory of its values."""
    if is_torch_sparse(tensor):
        memory = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    else:
        memory = tensor.values().detach() if isinstance(tensor, SparseTensor) else tensor
    address = memory.data_ptr() or id(tensor)  # subclasses that hold other tensors have no address
    return address, tensor.shape, memory.stride(), tensor.dtype, memory.is_conj(), memory.is_neg()


Modules = Mapping[str, nn.Module]
Places = dict[int, list[tuple[nn.Module, str]]]
"""By the id of a tensor, the modules that have it, and its names there."""

Parts = dict[str, tuple[int, str]]
"""The arrays of a tensor by part ("" for a dense tensor): the number of the file, and the array's name in it."""


@contextmanager
def _opened(path: Path) -> Iterator[list[Any]]:
    paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not paths or not all(each.is_file() for each in paths):
        raise FormatError(f"there is no safetensors file at {path}")
    try:
        yield [safe_open(each, "pt") for each in paths]
    except SafetensorError as problem:
        raise FormatError(f"{path} is not a safetensors file, or is broken: {problem}") from None
    except FormatError as problem:  # a message of a tensor does not name the file
        raise problem if str(path) in str(problem) else FormatError(f"{path}: {problem}") from None


def _contents(files: list[Any]) -> tuple[dict[str, Parts], dict[str, str]]:
    """Returns the tensors in files, and the tied names: names that stand for another tensor."""
    names = {name: number for number, file in enumerate(files) for name in file.keys()}  # noqa: SIM118
    stored: dict[str, Parts] = {}
    for name in names:
        base, _, part = name.rpartition(".")
        for kind in (BITMASK[:3], GAPS, DEFLATED):
            keys = {each: tensor_of(base, each) for each in kind}
            if part in (*kind, *BITMASK) and names.keys() >= {*keys.values()}:
                stored[base] = {each: (names[key], key) for each, key in keys.items()}
                break
        else:
            if part.startswith(ARRAY) and f"{base}.{FORMAT}" in names and f"{base}.{SHAPE}" in names:
                stored.setdefault(base, {})[part] = names[name], name
                continue
            stored[name] = {"": (names[name], name)}
    tied: dict[str, str] = {}
    for file in files:
        mark = (file.metadata() or {}).get(_MARK)
        if mark is None:
            continue
        try:
            head = json.loads(mark)
            version, told = head["version"], dict(head["tied"])
        except (ValueError, KeyError, TypeError):
            raise FormatError(f"the metadata of the file cannot be read, it is damaged: {mark[:80]!r}") from None
        if version != _VERSION:
            raise FormatError(
                f"the file is of version {version}, this Gossamer reads version {_VERSION}: install a newer Gossamer"
            )
        tied |= told
    return stored, tied


def _with_scales(stored: dict[str, Parts], own: Mapping[str, Tensor], files: list[Any]) -> dict[str, Parts]:
    """Returns `stored` with integers and scales joined to one tensor, for float weights of the model."""
    found = dict(stored)
    for scale in [name for name in stored if name.rpartition(".")[2] == SCALE and name not in own]:
        layer = scale.rpartition(".")[0]
        weight, packed = tensor_of(layer, "weight"), tensor_of(layer, PACKED)
        if weight not in own:
            continue
        if packed in found and tensor_of(layer, "weight_shape") in found:
            codes = {PACKED: found.pop(packed)[""]}
        elif "bitmask" in found.get(layer, {}) or "bitmask" in found.get(weight, {}):
            codes = found.pop(layer if layer in found else weight)
        elif weight in found and _is_of_8_bits(found[weight], files):
            codes = {"weight": found[weight][""]}
        else:
            continue
        beside = {part: found.pop(name)[""] for part in BESIDE if (name := tensor_of(layer, part)) in found}
        found[weight] = codes | beside
    return found


def _is_of_8_bits(parts: Parts, files: list[Any]) -> bool:
    return "" in parts and files[parts[""][0]].get_slice(parts[""][1]).get_dtype().startswith(("I8", "F8"))


def _own_name(name: str, parts: Parts, own: Mapping[str, Tensor]) -> str:
    """Returns the model's name of a tensor. compressed-tensors names a bitmask after the layer, without "weight"."""
    of_layer = "bitmask" in parts and name not in own
    return tensor_of(name, "weight") if of_layer and tensor_of(name, "weight") in own else name


def _buffers(name: str, layer: nn.Module) -> dict[str, Tensor]:
    """Returns a layer's own buffers by their names in the state dict."""
    return {tensor_of(name, part): buffer for part, buffer in layer.named_buffers(recurse=False)}


def _groups(layers: dict[str, GroupedLinear], stored: dict[str, Parts], files: list[Any]) -> dict[str, Tensor]:
    """Returns the groups in files for GroupedLinear layers, after checking them, before anything changes."""
    found: dict[str, Tensor] = {}
    for name, layer in layers.items():
        own = tensor_of(name, _GROUPS)
        if own in stored:  # otherwise the name is tied to another
            found[name] = _tensor(own, stored[own], files)
            layer.check_groups(name, found[name])
    return found


def _check(
    own: dict[str, Tensor],
    stored: Shapes,
    dtype_of: Callable[[str], torch.dtype],
    tied: dict[str, str],
    path: Any,
    ragged: set[str],
) -> None:
    tied.update(_tied_here(own, stored.keys() | tied.keys(), stored))
    missing, more = own.keys() - stored.keys() - tied.keys(), (stored.keys() | tied.keys()) - own.keys()
    dangling = [name for name, other in tied.items() if other not in stored]
    if missing or more or dangling:
        wrong = (("missing", missing or dangling), ("unknown", more))
        said = [f"{what}: {', '.join(sorted(which)[:5])}" for what, which in wrong if which]
        raise FormatError(f"{path} is not of this model; {'; '.join(said)}. Load it into a model of the same architecture")
    sources = {**{name: name for name in stored}, **tied}
    compared = {name: other for name, other in sources.items() if name.rpartition(".")[2] != _EXTRA}
    for name, other in compared.items():
        if stored[other] != tuple(own[name].shape) and name not in ragged:
            raise FormatError(
                f"{path}: '{name}' has shape {stored[other]}, in this model {tuple(own[name].shape)}. "
                "Load it into a model of the same sizes"
            )
    for name, other in compared.items():
        if (dtype := dtype_of(other)).is_floating_point != own[name].is_floating_point():
            raise FormatError(
                f"{path}: '{name}' is {dtype}, in this model {own[name].dtype}. "
                "Load it into a model with the same kinds of layers"
            )


def _dtype(name: str, parts: Parts, files: list[Any]) -> torch.dtype:
    """Returns the type of a tensor in files."""
    if SCALE in parts:  # integers, which become floats; `floats_of` checks the scale
        return torch.float32
    if any(each.startswith(ARRAY) for each in parts):
        return _tensor(name, parts, files).dtype
    number, key = parts[next(each for each in ("", "values", "compressed", "type") if each in parts)]
    dtype: torch.dtype = files[number].get_tensor(key).dtype
    return dtype


def _shape(parts: Parts, files: list[Any]) -> tuple[int, ...]:
    if whole := parts.get("", parts.get("weight")):
        number, key = whole
        return tuple(files[number].get_slice(key).get_shape())
    number, key = parts[next(part for part in (SHAPE, "shape", "weight_shape") if part in parts)]
    return tuple(files[number].get_tensor(key).flatten().tolist())


def _tied_here(own: dict[str, Tensor], known: Any, stored: Shapes) -> dict[str, str]:
    """Returns tied names that files of other libraries leave out, because the model has the tensor under another name, too."""
    by_tensor = {id(own[name]): name for name in stored if name in own}
    return {name: by_tensor[id(each)] for name, each in own.items() if name not in known and id(each) in by_tensor}


def _tensor(name: str, parts: Parts, files: list[Any]) -> Tensor:
    arrays = {part: files[number].get_tensor(key) for part, (number, key) in parts.items()}
    if FORMAT in arrays:
        return sparse_tensor(name, arrays)
    if SCALE in arrays:
        return floats_of(name, arrays | {"weight": decoded(name, arrays)} if "bitmask" in arrays else arrays)
    return arrays[""] if "" in arrays else decoded(name, arrays)


def _tie(modules: Modules, name: str, other: str) -> None:
    """Makes two new layers share a tensor that the file stores once, so that results computed from it are shared, too."""
    (holder, _, last), (source, _, part) = name.rpartition("."), other.rpartition(".")
    setattr(modules[holder], last, getattr(modules[source], part))


def _places(modules: Modules) -> Places:
    found: Places = {}
    for module in {id(module): module for module in modules.values()}.values():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                found.setdefault(id(tensor), []).append((module, key))
    return found


def _put(modules: Modules, places: Places, name: str, own: Tensor, value: Tensor) -> None:
    holder, _, last = name.rpartition(".")
    module = modules[holder]
    if last == _EXTRA:
        module.set_extra_state(value.clone())
    elif own.is_meta:
        made = as_held(own, value).to(own.dtype).clone()  # a copy, because the file will be closed
        if isinstance(own, nn.Parameter):
            made = nn.Parameter(made, own.requires_grad)
        for other, key in places[id(own)]:  # tied weights stay tied
            setattr(other, key, made)  # recurrent layers have a second list of their weights
    elif own is getattr(module, last, None):
        with torch.no_grad():
            own.copy_(as_sparse(value) if is_torch_sparse(own) else value)
    else:  # a packed weight; the state dict only has a copy
        setattr(module, last, value.to(own))
