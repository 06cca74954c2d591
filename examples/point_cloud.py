"""Segment point clouds by a small submanifold U-Net: which primitive does a point of a scanned surface belong to?

Each scene is made here: a few spheres, tori, boxes and cylinders, touching each other, whose surfaces are sampled, voxelised
and labelled by shape. The network sees nothing but which voxels are taken, so it has to learn curvature from neighbours. Its
modules have spconv's names and arguments. Graham et al., "3D semantic segmentation with submanifold sparse convolutional
networks", 2018.

    pip install .
    python examples/point_cloud.py --steps 400
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from itertools import pairwise

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    import gossamer.nn as spconv
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs the package '{missing.name}': pip install . in the repository")

SHAPES = ("sphere", "torus", "box", "cylinder")
SIZE = 40  # voxels along each side of a scene


def surface(shape: str, count: int, random: torch.Generator) -> Tensor:
    """Points [count, 3] of a surface that fits into [-1, 1]³."""
    u, v, w = torch.rand(3, count, generator=random)
    angle, across = 2 * math.pi * u, 2 * math.pi * v
    if shape == "sphere":
        height = 2 * v - 1
        radius = (1 - height**2).sqrt()
        return torch.stack([radius * angle.cos(), radius * angle.sin(), height], 1)
    if shape == "torus":
        radius = 0.7 + 0.3 * across.cos()
        return torch.stack([radius * angle.cos(), radius * angle.sin(), 0.3 * across.sin()], 1)
    if shape == "cylinder":
        cap = w < 1 / 3
        radius = torch.where(cap, v.sqrt(), 1.0)
        return (
            torch.stack([radius * angle.cos(), radius * angle.sin(), torch.where(cap, (v * 99 % 2).floor(), v) * 2 - 1], 1)
            * 0.7
        )
    points = torch.stack([2 * u - 1, 2 * v - 1, (w * 2).floor() * 2 - 1], 1) * 0.7
    turns = torch.randint(0, 3, (count,), generator=random)
    return points.gather(1, (torch.arange(3) + turns[:, None]) % 3)


def rotation(random: torch.Generator) -> Tensor:
    """Of [3, 3], any."""
    return torch.linalg.qr(torch.randn(3, 3, generator=random))[0]


def scene(number: int, objects: int = 3) -> tuple[Tensor, Tensor]:
    """Voxels int32 [N, 3] of a scene, and the shape of each [N]; of those of two shapes the first."""
    random = torch.Generator().manual_seed(number)
    points, labels = [], []
    for _ in range(objects):
        kind = int(torch.randint(0, len(SHAPES), (1,), generator=random))
        size = 7 + 3 * torch.rand(1, generator=random)
        centre = size + 1 + (SIZE - 2 * size - 2) * torch.rand(3, generator=random)
        points.append(surface(SHAPES[kind], 3000, random) @ rotation(random) * size / math.sqrt(1.5) + centre)
        labels.append(torch.full((3000,), kind))
    voxels, which = torch.unique(torch.cat(points).floor().int().clamp(0, SIZE - 1), dim=0, return_inverse=True)
    first = torch.full((len(voxels),), len(SHAPES)).scatter_reduce(0, which, torch.cat(labels), "amin")
    return voxels, first


def batch(numbers: range) -> tuple[Tensor, Tensor, Tensor]:
    """Features [N, 1], indices int32 [N, 4] and labels [N] of some scenes."""
    scenes = [scene(number) for number in numbers]
    indices = torch.cat([F.pad(voxels, (1, 0), value=at) for at, (voxels, _) in enumerate(scenes)]).contiguous()
    features = torch.ones(len(indices), 1)
    for tensor in (features, indices):
        torch._dynamo.mark_dynamic(tensor, 0)
    return features, indices, torch.cat([labels for _, labels in scenes])


def block(channels: int, made: int) -> spconv.SparseSequential:
    """Two convolutions among the same voxels."""
    layers: list[nn.Module] = []
    for before in (channels, made):
        layers += [spconv.SubMConv3d(before, made, 3, bias=False), nn.BatchNorm1d(made), nn.ReLU()]
    return spconv.SparseSequential(*layers)


class Unet(nn.Module):
    """Scores [N, shapes] of voxels: down by convolutions of stride 2, back up to the same voxels, with skip connections."""

    def __init__(self, scenes: int, widths: tuple[int, ...] = (16, 32, 48)) -> None:
        super().__init__()
        self.scenes, finer = scenes, list(pairwise(widths))
        self.begin = block(1, widths[0])
        self.down = nn.ModuleList(
            spconv.SparseSequential(spconv.SparseConv3d(a, b, 2, 2, indice_key=f"level{a}"), block(b, b)) for a, b in finer
        )
        self.up = nn.ModuleList(spconv.SparseInverseConv3d(b, a, 2, indice_key=f"level{a}") for a, b in finer)
        self.join = nn.ModuleList(block(2 * a, a) for a, _ in finer)
        self.end = nn.Linear(widths[0], len(SHAPES))

    def forward(self, features: Tensor, indices: Tensor) -> Tensor:
        x = self.begin(spconv.SparseConvTensor(features, indices, [SIZE] * 3, self.scenes))
        skipped = []
        for down in self.down:
            skipped.append(x)
            x = down(x)
        for up, join, skip in zip(reversed(self.up), reversed(self.join), reversed(skipped), strict=True):
            x = join(skip.replace_feature(torch.cat([skip.features, up(x).features], 1)))
        scores: Tensor = self.end(x.features)
        return scores


def accuracy(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(1) == labels).float().mean())


def picture(indices: Tensor, found: Tensor, columns: int = SIZE) -> str:
    """The first scene from above, a letter for the shape of the highest voxel."""
    lines = [[" "] * columns for _ in range(columns // 2)]
    for (number, x, y, _), kind in zip(indices.tolist(), found.tolist(), strict=True):  # ascending, so the highest comes last
        if number == 0:
            lines[x // 2][y] = SHAPES[kind][0]
    return "\n".join("".join(line).rstrip() for line in lines)


def milliseconds(network: Callable[..., Tensor], given: tuple[Tensor, Tensor]) -> float:
    """The least of five calls."""
    best = float("inf")
    with torch.no_grad():
        network(*given)
        for _ in range(5):
            start = time.perf_counter()
            network(*given)
            best = min(best, 1e3 * (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=400, help="of training, ten a second on two cores (default 400)")
    parser.add_argument("--scenes", type=int, default=4, help="in a batch (default 4)")
    args = parser.parse_args()

    torch.manual_seed(0)
    network = Unet(args.scenes)
    compiled = torch.compile(network, backend="sparse", fullgraph=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3)
    held_out = batch(range(args.scenes))
    print(f"{len(held_out[1]):,} of {args.scenes * SIZE**3:,} voxels are taken in the {args.scenes} scenes that are held out")

    print("the first step compiles the network, which takes about half a minute", flush=True)

    begin = time.perf_counter()
    for step in range(args.steps):
        features, indices, labels = batch(range(1000 + step * args.scenes, 1000 + (step + 1) * args.scenes))
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * max(0.02, 1 - step / args.steps)
        scores = compiled(features, indices)
        loss = F.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            spent, right = time.perf_counter() - begin, accuracy(scores, labels)
            print(
                f"{spent:5.0f} s  step {step:4}  loss {loss.item():.3f}  {right:.1%} of {len(labels):,} voxels right",
                flush=True,
            )

    network.eval()
    features, indices, labels = held_out
    with torch.no_grad():
        scores, eager = compiled(features, indices), network(features, indices)
    common = float(labels.bincount().max()) / len(labels)
    right = accuracy(scores, labels)
    print(f"\nscenes that it has not seen: {right:.1%} of the voxels are right; guessing the commonest shape: {common:.1%}")
    for kind, name in enumerate(SHAPES):
        of = labels == kind
        print(f"  {name:9} {accuracy(scores[of], labels[of]):.1%} of {int(of.sum()):,}" if of.any() else f"  {name:9} none")
    print(picture(indices, scores.argmax(1)))
    difference = float((scores - eager).abs().max() / eager.abs().max())
    times = [milliseconds(each, (features, indices)) for each in (compiled, network)]
    print(f"inference: {times[0]:.1f} ms compiled, {times[1]:.1f} ms eager")
    print(f"largest difference of the two: {difference:.1e} of the largest score")
    if not difference < 1e-4:
        sys.exit("compiled and eager scores differ")


if __name__ == "__main__":
    main()
