"""A MobileNet whose pointwise layers are pruned: speed over sparsity, beside what torch makes of the same network dense.

MobileNetV1 (Howard and others, 2017) as `transformers` defines it, with random weights: what is shown is time, and that
the results are the same. Nearly all of its multiplications are in its pointwise convolutions; pruned, they become sparse
products with pixels in lanes, and the depthwise ones between them are computed in the same layout (Elsen and others, "Fast
Sparse ConvNets", 2020).

    pip install '.[examples]'
    python examples/pruned_mobilenet.py --sparsity .7,.8,.9,.95 --plot mobilenet.png
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

try:
    import torch
    from torch import Tensor, nn
    from transformers import MobileNetV1Config, MobileNetV1Model

    import gossamer
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs the package '{missing.name}': pip install '.[examples]' in the repository")


class MobileNet(nn.Module):
    """Images [batch, 3, height, width] → features [batch, 1024]."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MobileNetV1Model(MobileNetV1Config())

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.model(images).pooler_output
        return features


@torch.no_grad()
def prune(model: nn.Module, sparsity: float) -> None:
    """Zeroes the smallest weights of every pointwise convolution."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            sizes = module.weight.abs()
            module.weight *= sizes > sizes.flatten().kthvalue(int(sparsity * sizes.numel())).values


def milliseconds(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The median of each call's times; they take turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: median(each) for name, each in taken.items()}


def plot(sparsities: list[float], times: list[dict[str, float]], path: Path) -> None:
    """How many times as fast as torch, over the share of zeros."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    for name in ("eager", "Inductor"):
        axes.plot([100 * s for s in sparsities], [found[name] / found["Gossamer"] for found in times], marker="o", label=name)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set(xlabel="zeros in pointwise layers, %", ylabel="times as fast as", title="MobileNetV1, one image of 224 x 224")
    axes.legend()
    figure.savefig(path)
    print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sparsity", default=".8,.9", help="shares of zeros (default .8,.9)")
    parser.add_argument("--size", type=int, default=224, help="height and width of the image (default 224)")
    parser.add_argument("--seconds", type=float, default=3, help="of measuring for each sparsity (default 3)")
    parser.add_argument("--plot", type=Path, help="where to draw speed over sparsity (needs matplotlib)")
    args = parser.parse_args()
    sparsities = [float(share) for share in args.sparsity.split(",")]

    torch.manual_seed(0)
    image = torch.randn(1, 3, args.size, args.size)
    times = []
    with torch.no_grad():
        for sparsity in sparsities:
            torch.compiler.reset()
            model = MobileNet().eval()
            prune(model, sparsity)
            ours, inductor = torch.compile(model, backend="sparse"), torch.compile(model)
            error = float((ours(image) - model(image)).abs().max() / model(image).abs().max())
            inductor(image)
            times.append(
                found := milliseconds(
                    {"eager": lambda: model(image), "Inductor": lambda: inductor(image), "Gossamer": lambda: ours(image)},  # noqa: B023
                    args.seconds,
                )
            )
            told = ", ".join(f"{name} {ms:.1f} ms" for name, ms in found.items())
            print(f"{sparsity:.0%} zeros: {told}; results differ by {error:.0e} of the largest")
            if not error < 1e-4:
                sys.exit("the results differ")
        print(gossamer.explain(model, image))
    if args.plot:
        plot(sparsities, times, args.plot)


if __name__ == "__main__":
    main()
