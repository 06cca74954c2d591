"""Convolutional networks of `transformers`, and a detector like YOLOv5, with random weights: their pointwise and k x k
convolutions pruned by magnitude.

The first convolution, depthwise ones and the classifier stay as they are, as those who prune such networks leave them. Of
ConvNeXt, whose pointwise layers are Linears, those are pruned.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.arguments import add_list, shares, sizes, some_of
from benchmarks.detector import Detector
from benchmarks.models import PrunedModel
from benchmarks.pruning import prune
from benchmarks.registry import Case, Workload

PIXELS = 224
TOLERANCE = {"f32": 2e-4, "bf16": 1e-1}
GFLOP = {
    "mobilenet1": 1.1,
    "mobilenet2": 0.6,
    "efficientnet": 0.8,
    "resnet18": 3.6,
    "resnet50": 8.2,
    "convnext": 9.0,
    "yolo": 1.0,
}
_EFFICIENTNET = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "image_size": PIXELS, "hidden_dim": 1280}
_RESNET18 = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}


class Classifier(nn.Module):
    """Images [batch, 3, 224, 224] → scores of classes [batch, classes]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.model(images).logits
        return scores


def classifier(name: str) -> nn.Module:
    """A network of this name."""
    import transformers as hf

    networks: dict[str, Callable[[], Any]] = {
        "mobilenet1": lambda: hf.MobileNetV1ForImageClassification(hf.MobileNetV1Config()),
        "mobilenet2": lambda: hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config()),
        "efficientnet": lambda: hf.EfficientNetForImageClassification(hf.EfficientNetConfig(**_EFFICIENTNET)),
        "resnet18": lambda: hf.ResNetForImageClassification(hf.ResNetConfig(**_RESNET18)),
        "resnet50": lambda: hf.ResNetForImageClassification(hf.ResNetConfig()),
        "convnext": lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig()),
        "yolo": Detector,
    }
    model = networks[name]()
    if name == "efficientnet":  # its pool has a window of 1280 x 1280, which Inductor walks through for images of 7 x 7
        model.efficientnet.pooler = nn.AdaptiveAvgPool2d(1)
    for module in model.modules():  # the small weights of transformers let activations vanish, beside what batch norms add
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return model if name == "yolo" else Classifier(model)


@torch.no_grad()
def with_statistics(model: nn.Module, images: Tensor) -> nn.Module:
    """The model in eval mode, its batch norms with the statistics of these images: without, activations would vanish layer by
    layer, into numbers so small that processors are slow with them."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    model.train()(images)
    return model.eval()


@torch.no_grad()
def prune_convolutions(model: nn.Module, sparsity: float) -> None:
    """Prunes every convolution by itself, but for the first and depthwise ones, and the Linears between them."""
    for name, module in model.named_modules():
        dense = isinstance(module, nn.Conv2d) and (module.groups > 1 or module.in_channels == 3)
        if isinstance(module, nn.Conv2d | nn.Linear) and not dense and "classifier" not in name:
            prune(module.weight.flatten(1), "unstructured", sparsity)


def add_arguments(parser: argparse._ActionsContainer) -> None:
    add_list(parser, "--networks", some_of(*GFLOP), ",".join(GFLOP), "the networks")
    add_list(parser, "--sparsity", shares, ".7,.8,.9,.95", "shares of zeros")
    add_list(parser, "--batch", sizes, "1,8", "images")


def build(name: str, sparsity: float, batch: int) -> PrunedModel:
    torch.manual_seed(0)
    model = classifier(name)
    prune_convolutions(model, sparsity)
    with_statistics(model, torch.randn(2, 3, PIXELS, PIXELS))
    return PrunedModel(model, (torch.randn(batch, 3, PIXELS, PIXELS),), TOLERANCE)


def cases(args: argparse.Namespace) -> list[Case]:
    return [
        Case(
            f"{name} {sparsity:.0%} {batch}x{PIXELS}",
            {"network": name, "sparsity": sparsity, "batch": batch},
            partial(build, name, sparsity, batch),
            batch * GFLOP[name],
        )
        for name in args.networks
        for sparsity in args.sparsity
        for batch in args.batch
    ]


WORKLOAD = Workload(
    "convolutional networks with pruned convolutions", add_arguments, cases, panels=("network", "batch"),
    across="sparsity", preparing=20.0,
)  # fmt: skip
