"""A small model for each kind of operation that reads a weight with zeros, and how tests write and read its zeros."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformers.integrations.moe
from torch import Tensor, nn
from torch.nn.utils import prune

import gossamer
from tests.backend import experts_in_models, smaller, test_dequantized_products, test_low_rank
from tests.backend.harness import prune_

assert transformers.integrations.moe  # has the product with offsets of mixtures

DENSITY = 0.2


@dataclass(frozen=True)
class Kind:
    """A model, and what becomes of it.

    make      makes the model, without zeros
    sizes     the sizes of its input
    regions   how many of its weights sparse kernels read in inference
    joined    words of the report about a kernel that computes more than one product; empty if there are no chains
    training  how many products with these weights are sparse in training; None if tests do not train the model
    block     the edges of the blocks that are zero or not
    dtype     of the model
    exact     whether its results are those of the model in float64; those of quantized layers are not
    """

    make: Callable[[], nn.Module]
    sizes: tuple[int, ...]
    regions: int
    joined: str = ""
    training: int | None = None
    block: tuple[int, int] = (1, 1)
    dtype: torch.dtype = torch.float32
    exact: bool = True


class Product(nn.Module):
    """A product with a weight, however it is written."""

    def __init__(self, written: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.written = nn.Parameter(torch.randn(48, 64) / 8), nn.Parameter(torch.randn(48)), written

    def forward(self, x: Tensor) -> Tensor:
        return self.written(x, self.weight, self.bias)


class Masked(nn.Module):
    """A weight times a mask, in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.mask = nn.Parameter(torch.randn(48, 64) / 8), nn.Buffer(torch.ones(48, 64))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask)


class Tied(nn.Module):
    """A table of words that is the weight of the last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.between = nn.Embedding(48, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.abs() * 100).long() % 48
        return F.linear(torch.tanh(self.between(self.words(ids))), self.words.weight)


class Bags(nn.Module):
    """Sums of rows of a pruned table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(48, 64, mode="sum"), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table((x.abs() * 100).long() % 48))  # type: ignore[no-any-return]


class Graph(nn.Module):
    """Two layers over a graph whose adjacency matrix is stored dense."""

    def __init__(self) -> None:
        super().__init__()
        self.edges, self.layer = nn.Buffer(torch.rand(48, 48)), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.edges @ torch.relu(self.layer(self.edges @ x))  # type: ignore[no-any-return]


class Separable(nn.Module):
    """Convolutions in a row: pointwise, depthwise, pointwise."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.project = nn.Conv2d(16, 24, 1), nn.Conv2d(24, 16, 1)
        self.depthwise = nn.Conv2d(24, 24, 3, padding=1, groups=24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(F.relu6(self.depthwise(F.relu6(self.widen(x)))))  # type: ignore[no-any-return]


def under_masks(model: nn.Module) -> nn.Module:
    """The same with masks of torch's own pruning, which hides nothing yet."""
    for layer in [each for each in model.modules() if isinstance(each, nn.Linear)]:
        prune.custom_from_mask(layer, "weight", torch.ones_like(layer.weight))
    return model


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def dequantized() -> nn.Module:
    return test_dequantized_products.Quantized(torch.ones(48, 64, dtype=torch.int8), by_row=False)


def written(product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Product(product)


KINDS: dict[str, Kind] = {
    "linear": Kind(layers, (24, 64), 2, training=4),
    "few rows": Kind(layers, (1, 64), 2),
    "bf16": Kind(layers, (24, 64), 2, dtype=torch.bfloat16),
    "float64": Kind(layers, (24, 64), 2, dtype=torch.float64),
    "blocks": Kind(layers, (24, 64), 2, block=(16, 16)),
    "masks": Kind(lambda: under_masks(layers()), (24, 64), 2, training=4),
    "a mask in the forward pass": Kind(Masked, (24, 64), 1, training=2),
    "chain": Kind(layers, (24, 64), 2, joined="chain of 2", training=4),
    "attention": Kind(smaller.Attention, (2, 9, 32), 4, joined="chain of 4"),
    "low rank": Kind(lambda: test_low_rank.Adapted(nn.Linear(64, 96), 4), (24, 64), 1, joined="beside it", training=2),
    "on the left": Kind(written(lambda x, w, b: w @ x), (64, 24), 1, training=2),
    "mv": Kind(written(lambda x, w, b: torch.mv(w, x)), (64,), 1),
    "addmm": Kind(written(lambda x, w, b: torch.addmm(b, x, w.T, alpha=2, beta=0.5)), (24, 64), 1),
    "bmm": Kind(written(lambda x, w, b: torch.bmm(x, w.T.expand(len(x), -1, -1))), (2, 12, 64), 1, training=2),
    "baddbmm": Kind(written(lambda x, w, b: torch.baddbmm(b, x, w.T.expand(len(x), -1, -1))), (2, 12, 64), 1),
    "einsum": Kind(written(lambda x, w, b: torch.einsum("bti,oi->bto", x, w)), (2, 12, 64), 1, training=2),
    "cell": Kind(lambda: nn.LSTMCell(64, 32), (24, 64), 2),
    "tied": Kind(Tied, (3, 8), 2, training=4),
    "bags": Kind(Bags, (8, 5), 1),
    "graph": Kind(Graph, (48, 64), 3),
    "conv1d": Kind(lambda: nn.Conv1d(16, 24, 3, padding=1), (2, 16, 30), 1, training=2),
    "conv2d": Kind(
        lambda: nn.Sequential(nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU(), nn.Conv2d(24, 16, 3)), (2, 16, 14, 14), 2, training=4
    ),
    "conv3d": Kind(lambda: nn.Conv3d(8, 24, 3, padding=1), (1, 8, 6, 7, 8), 1),
    "grouped convolution": Kind(lambda: nn.Conv2d(16, 32, 3, padding=1, groups=2), (2, 16, 14, 14), 1, training=2),
    "transposed convolution": Kind(lambda: nn.ConvTranspose2d(16, 12, 4, 2, 1), (2, 16, 9, 9), 1, training=2),
    "convolutions in a row": Kind(Separable, (2, 16, 14, 14), 2, training=4),
    "mixture": Kind(experts_in_models.Sorted, (90, 24), 2, joined="one operation for the layer"),
    "int8": Kind(lambda: gossamer.quantize(prune_(layers())), (24, 64), 2, exact=False),
    "dequantized": Kind(dequantized, (24, 64), 1, exact=False),
}


def weights(model: nn.Module) -> Iterator[Tensor]:
    """The tensors of a model that have zeros in these tests, except masks."""
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if each.dim() >= 2 and "mask" not in name and "lora" not in name and "router" not in name:
            yield each


@torch.no_grad()
def fill_(model: nn.Module) -> None:
    """No weight is zero any more, and no mask hides one."""
    for weight in weights(model):
        weight.copy_(torch.randn_like(weight) / 8 if weight.is_floating_point() else torch.randint_like(weight, 1, 127))
    for name, mask in model.named_buffers():
        if "mask" in name:
            mask.fill_(1)


@torch.no_grad()
def empty_(model: nn.Module, block: tuple[int, int] = (1, 1)) -> None:
    """Most of each weight becomes zero, and of each mask."""
    masks = [mask for name, mask in model.named_buffers() if "mask" in name]
    for each in masks or weights(model):
        rows, columns = each.shape[0], each[0].numel()
        kept = torch.rand(-(-rows // block[0]), -(-columns // block[1])) < DENSITY
        kept = kept.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
        each.mul_(kept.reshape(each.shape))
