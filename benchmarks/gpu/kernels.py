"""The kernels of a bundle: read from its manifest, given packed weights, called with torch's tensors."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from benchmarks.gpu.cases import Layer
from gossamer.dialects.format import Format
from gossamer.dialects.launch import Launch
from gossamer.dialects.packing import Packing, parse_packing
from gossamer.runtime.gpu_kernel import GpuKernel
from gossamer.runtime.packing import pack


@dataclass(frozen=True)
class Code:
    """PTX with kernels that compute the same. `dynamic`: for each tensor the dimensions whose size is passed."""

    ptx: str
    launches: dict[str, Launch]
    dynamic: list[list[int]]

    @classmethod
    def read(cls, folder: Path, entry: dict[str, Any]) -> Self:
        """An entry of the manifest. ValueError if the file of its PTX is damaged."""
        code = (folder / entry["file"]).read_bytes()
        if hashlib.sha256(code).hexdigest() != entry["sha256"]:
            raise ValueError(f"{entry['file']} is not the file that was packed")
        launches = {name: Launch.from_json(fields) for name, fields in entry["launches"].items()}
        return cls(code.decode(), launches, entry["dynamic"])

    def only(self, name: str) -> Self:
        """With one of its kernels only."""
        return replace(self, launches={name: self.launches[name]})

    def words(self, tensors: list[Tensor]) -> list[int]:
        """What its kernels are passed: address and dynamic sizes of each tensor, the result last."""
        pairs = zip(tensors, self.dynamic, strict=True)
        return [word for tensor, dims in pairs for word in (tensor.data_ptr(), *(tensor.shape[d] for d in dims))]

    def kernel(self, device: torch.device) -> GpuKernel:
        """The kernels, loaded on a device."""
        kernel = GpuKernel(self.ptx, self.launches, sum(1 + len(dims) for dims in self.dynamic))
        kernel.load(device.index or 0)
        return kernel


@dataclass(frozen=True)
class Bundled:
    """The kernels of a layer, as the bundle has them."""

    layer: Layer
    code: Code
    format: Format | Packing

    @classmethod
    def read(cls, folder: Path, entry: dict[str, Any]) -> Self:
        """An entry of the manifest. ValueError if the file of its PTX is damaged."""
        text = entry["format"]
        format = Format.parse(text) if text.startswith("#") else parse_packing(text)
        return cls(Layer.from_json(entry["layer"]), Code.read(folder, entry), format)

    def only(self, name: str) -> Self:
        """With one of its kernels only."""
        return replace(self, code=self.code.only(name))

    def packed(self, weight: Tensor, device: torch.device) -> list[Tensor]:
        """The arrays of a weight, on a device."""
        return [array.to(device) for array in pack(weight, self.format).components]


class Call:
    """A layer's kernels with a weight: `call(operands, out)` launches on the current stream."""

    def __init__(self, bundled: Bundled, weight: Tensor, device: torch.device) -> None:
        self._bundled, self._device = bundled, device
        self._weight = bundled.packed(weight, device)
        self._kernel = bundled.code.kernel(device)

    def __call__(self, operands: list[Tensor], out: Tensor) -> Tensor:
        x, *extras = operands
        words = self._bundled.code.words([x, *self._weight, *extras, out])
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._kernel.run(words, out.shape[0], self._device.index or 0, stream)
        return out


def manifest(folder: Path) -> dict[str, Any]:
    """The bundle's manifest."""
    return json.loads((folder / "manifest.json").read_text())
