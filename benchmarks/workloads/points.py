"""A submanifold convolution of 3x3x3 on the voxels of a bumpy sphere, and the milliseconds that its map takes."""

from __future__ import annotations

import math
import time
from argparse import Namespace, _ActionsContainer
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arguments import add_list, sizes
from benchmarks.contenders.sparse import missing
from benchmarks.models import largest_error
from benchmarks.registry import Case, Contender, Prepared, Unsupported, Work, Workload

_KERNEL, _DENSE_BYTES = 3, 4 << 30


@dataclass(frozen=True, eq=False)
class Points:
    """indices int32 [N, 4] in a grid of `size` along each side, x [N, C], weight [27, C, C]."""

    indices: Tensor
    size: int
    x: Tensor
    weight: Tensor
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"f32": 2e-5})
    precision: str = "f32"

    @cached_property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """By offset, the rows that are read and those that are written, int64."""
        wide = self.size + 2
        steps = torch.tensor([wide * wide, wide, 1])
        keys = ((self.indices[:, 1:].long() + 1) * steps).sum(1)
        keys, order = keys.sort()
        found = []
        for offset in torch.cartesian_prod(*[torch.arange(-1, 2)] * 3):
            wanted = keys + (offset * steps).sum()
            at = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
            there = keys[at] == wanted
            found.append((order[at[there]], order[there]))
        return found

    def reference(self) -> tuple[Tensor, Work]:
        expected = summed(self.x.double(), self.weight.double(), self.pairs)
        flops = 2.0 * sum(len(into) for into, _ in self.pairs) * self.weight[0].numel()
        return expected, Work(flops, flops, self.weight.nbytes, 2 * self.x.nbytes)

    def error(self, result: Tensor, expected: Tensor) -> float:
        return largest_error(result, expected)


def summed(x: Tensor, weight: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Gather, multiply and add, offset by offset."""
    y = x.new_zeros(len(x), weight.shape[2])
    for k, (into, out) in enumerate(pairs):
        y = y.index_add_(0, out, x.index_select(0, into) @ weight[k])
    return y


def eager(problem: Points) -> Prepared:
    given = problem.x, problem.weight, problem.pairs
    return Prepared(lambda: summed(*given))


def inductor(problem: Points) -> Prepared:
    given, made = (problem.x, problem.weight, problem.pairs), torch.compile(summed)
    return Prepared(lambda: made(*given))


def dense(problem: Points) -> Prepared:
    size, (_, channels, made) = problem.size, problem.weight.shape
    if 4 * size**3 * (channels + made) > _DENSE_BYTES:
        raise Unsupported(f"the dense grids would take more than {_DENSE_BYTES >> 30} GiB")
    place = tuple(problem.indices[:, 1:].long().T)
    weight = problem.weight.view(*[_KERNEL] * 3, channels, made).permute(4, 3, 0, 1, 2).contiguous()
    grid = problem.x.new_zeros(size, size, size, channels)
    grid[place] = problem.x
    grid = grid.movedim(-1, 0)[None].contiguous()
    return Prepared(lambda: F.conv3d(grid, weight, padding=1)[0].movedim(0, -1)[place])


def ours(compiled: bool, problem: Points) -> Prepared:
    import gossamer.nn
    from gossamer.sparsity.nn.site_maps import SiteMaps, site_maps
    from gossamer.sparsity.nn.sites import Sites

    shape, channels = [problem.size] * 3, problem.weight.shape[2]
    layer = gossamer.nn.SubMConv3d(problem.weight.shape[1], channels, _KERNEL, bias=False).requires_grad_(False)
    layer.weight.copy_(problem.weight.permute(2, 0, 1).view(layer.weight.shape))

    def convolved(x: Tensor, indices: Tensor) -> Tensor:
        result: Tensor = layer(gossamer.nn.SparseConvTensor(x, indices, shape, 1)).features
        return result

    call = torch.compile(convolved, backend="sparse", fullgraph=True) if compiled else convolved

    def map_seconds() -> float:
        start = time.perf_counter()
        SiteMaps(Sites.of(problem.indices, shape, 1)).map("same", (), layer.window)
        return time.perf_counter() - start

    def notes() -> dict[str, Any]:
        pairs = site_maps(problem.indices, shape, 1).map("same", (), layer.window)
        return {"map_ms": 1e3 * min(map_seconds() for _ in range(5)), "map_bytes": pairs.bytes, "pairs": len(pairs.inputs)}

    return Prepared(lambda: call(problem.x, problem.indices), notes)


def spconv(problem: Points) -> Prepared:
    """Its CPU build, which has one algorithm; pairs are kept as they are for layers with one `indice_key`."""
    import spconv.pytorch

    _, channels, made = problem.weight.shape
    layer = spconv.pytorch.SubMConv3d(
        channels, made, _KERNEL, bias=False, indice_key="kept", algo=spconv.pytorch.ConvAlgo.Native
    ).requires_grad_(False)
    layer.weight.copy_(problem.weight.permute(2, 0, 1).view(layer.weight.shape))

    def given() -> Any:
        return spconv.pytorch.SparseConvTensor(problem.x, problem.indices, [problem.size] * 3, 1)

    kept = layer(given()).indice_dict

    def call() -> Tensor:
        tensor = given()
        tensor.indice_dict = kept
        result: Tensor = layer(tensor).features
        return result

    return Prepared(call)


def without_spconv() -> str | None:
    return None if find_spec("spconv") else "spconv is not installed: pip install spconv"


def sphere(voxels: int) -> tuple[Tensor, int]:
    """About so many voxels of a bumpy sphere, int32 [N, 4] in ascending order, and the size of their grid."""
    radius = 0.23 * math.sqrt(voxels)
    directions = torch.randn(12 * voxels, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    directions /= directions.norm(dim=1, keepdim=True)
    bumps = 1 + 0.1 * torch.sin(9 * directions[:, 0]) * torch.cos(7 * directions[:, 1])
    places = torch.unique((directions * (radius * bumps)[:, None] + 1.2 * radius + 1).int(), dim=0)
    return F.pad(places, (1, 0)), int(2.4 * radius) + 3


def build(voxels: int, channels: int) -> Points:
    indices, size = sphere(voxels)
    random = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*shape, generator=random) for shape in ((len(indices), channels), (27, channels, channels)))
    return Points(indices, size, x, weight / math.sqrt(27 * channels))


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--voxels", sizes, "10000,100000,1000000", "about how many")
    add_list(parser, "--channels", sizes, "64", "of what comes in and out")


def cases(args: Namespace) -> list[Case]:
    return [
        Case(
            f"{voxels:,} voxels, {c} channels",
            {"voxels": voxels, "channels": c},
            partial(build, voxels, c),
            26e-9 * voxels * c * c,
        )
        for voxels in args.voxels
        for c in args.channels
    ]


def conclude(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """What maps take."""
    found = [(case["name"], case["results"].get("sparse", {}).get("notes", {})) for case in cases]
    return [
        f"{name}: the map of {notes['pairs']:,} pairs takes {notes['map_ms']:.1f} ms and {notes['map_bytes'] / 1e6:.1f} MB."
        for name, notes in found
        if "map_ms" in notes
    ]


def contenders() -> dict[str, Contender]:
    ways: dict[str, tuple[str, Callable[[Any], Prepared]]] = {
        "eager": ("PyTorch, gather and index_add", eager),
        "inductor": ("Inductor, gather and index_add", inductor),
        "dense": ("PyTorch conv3d, dense", dense),
    }
    found = {name: Contender(label, way) for name, (label, way) in ways.items()}
    own = {"sparse": ("Gossamer", True), "sparse-eager": ("Gossamer, eager", False)}
    found |= {name: Contender(label, partial(ours, compiled), missing=missing) for name, (label, compiled) in own.items()}
    return found | {"spconv": Contender("spconv, CPU build", spconv, missing=without_spconv)}


WORKLOAD = Workload(
    "a submanifold convolution of 3x3x3 on voxels of a surface",
    add_arguments,
    cases,
    contenders=contenders,
    baselines=("eager", "inductor"),
    conclude=conclude,
    preparing=5,
    gflops=40.0,
)
