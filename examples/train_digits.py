"""Train an MLP and a convolutional net on scikit-learn's digits, sparse by every recipe of `gossamer.train_sparse`.

    pip install '.[examples]'
    python examples/train_digits.py --network mlp --seeds 5 --csv digits.csv
    python examples/train_digits.py --recipes dense rigl gradual --compile

Prints mean and deviation of the accuracy over seeds; the CSV has loss and density of each layer over time. With TensorBoard
installed, `--board DIR` writes the same for it, and with matplotlib `--plot FILE` the loss over time.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import Tensor, nn

    import gossamer
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs the package '{missing.name}': pip install '.[examples]' in the repository")

TESTED, BATCH = 360, 64  # of 1797 images

RECIPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "one-shot": {"sparsity": 0.9, "at": 100, "distribution": "global"},
    "gradual": {"sparsity": 0.9},
    "gradual, first order": {"recipe": "gradual", "sparsity": 0.9, "begin": 10, "saliency": "first-order"},
    "gradual, second order": {"recipe": "gradual", "sparsity": 0.9, "begin": 10, "saliency": "second-order"},
    "gradual, blocks": {"recipe": "gradual", "sparsity": 0.9, "pattern": "4x1"},
    "random": {"sparsity": 0.9},
    "set": {"sparsity": 0.9, "every": 25},
    "rigl": {"sparsity": 0.9, "every": 25},
    "soft": {"sparsity": 0.9},
    "V:N:M": {"recipe": "one-shot", "pattern": "8:2:8"},
    **{
        f"{name}, {pattern}": {"recipe": name, "pattern": pattern}
        for pattern in ("2:4", "1:8")
        for name in ("sr-ste", "mask-decay", "progressive-gradient-flow", "structure-decay", "step", "bi-mask")
    },
}
"""What `train_sparse` is given; a recipe of another name says so."""

Row = tuple[str, int, int, str, float, float]
"""Recipe, seed, step, layer, its density, the loss of the batch."""


def network(kind: str) -> nn.Module:
    """Images, float32 [batch, 1, 8, 8] → ten scores each."""
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    convolutions = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))


def data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and digits to train on, and others to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels, order = torch.tensor(digits.target), torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, train = order[:TESTED], order[TESTED:]
    return images[train], labels[train], images[test], labels[test]


def skipped(kind: str, recipe: str) -> list[Any]:
    """Layers that stay dense: the last, of ten rows; a first of nine columns; for Bi-Mask what is not linear."""
    last = "5" if kind == "mlp" else "7"
    return [last] if kind == "mlp" else [last, "0", *([nn.Conv2d] if recipe == "bi-mask" else [])]


def train(kind: str, name: str, seed: int, steps: int, compile: bool) -> tuple[float, list[Row]]:
    """Accuracy on the test images, and the rows of the CSV."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = data(seed)
    model = network(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    options = dict(RECIPES[name])
    recipe, training = options.pop("recipe", name.partition(",")[0]), None
    if recipe != "dense":
        skip = skipped(kind, recipe)
        training = gossamer.train_sparse(model, optimizer, recipe, steps=steps, seed=seed, skip=skip, **options)
    call = torch.compile(model, backend="sparse") if compile else model
    batches, rows = torch.Generator().manual_seed(seed), list[Row]()
    for step in range(steps):
        at = torch.randint(len(images), (BATCH,), generator=batches)
        loss = F.cross_entropy(call(images[at]), labels[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        if step % 10 == 0 or step == steps - 1:
            densities = {"all": 1.0} if training is None else training.densities()
            rows += [(name, seed, step, layer, density, loss.item()) for layer, density in densities.items()]
    if training is not None:
        training.detach()
    with torch.no_grad():
        right = model(test_images).argmax(1) == test_labels
    return 100 * float(right.float().mean()), rows


def write(rows: list[Row], arguments: argparse.Namespace) -> None:
    """CSV, TensorBoard and plot, those that are asked for."""
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            csv.writer(file).writerows([("recipe", "seed", "step", "layer", "density", "loss"), *rows])
    if arguments.board:
        from torch.utils.tensorboard import SummaryWriter

        for name in dict.fromkeys(row[0] for row in rows):
            with SummaryWriter(arguments.board / name) as board:
                for _, seed, step, layer, density, loss in (row for row in rows if row[0] == name):
                    board.add_scalar(f"seed {seed}/loss", loss, step)
                    board.add_scalar(f"seed {seed}/density of {layer}", density, step)
    if arguments.plot:
        import matplotlib.pyplot as plt

        for name in dict.fromkeys(row[0] for row in rows):
            points = dict.fromkeys((step, loss) for n, seed, step, _, _, loss in rows if n == name and seed == 0)
            plt.plot(*zip(*points, strict=True), label=name)
        plt.xlabel("step")
        plt.ylabel("loss of the batch")
        plt.yscale("log")
        plt.legend(fontsize=6)
        plt.savefig(arguments.plot, dpi=150)


def add_files(parser: argparse.ArgumentParser) -> None:
    """The options of `write`."""
    parser.add_argument("--csv", type=Path, help="a file for density and loss over time")
    parser.add_argument("--board", type=Path, help="a folder for TensorBoard")
    parser.add_argument("--plot", type=Path, help="a file for the loss over time")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--network", choices=("mlp", "conv"), default="mlp")
    parser.add_argument(
        "--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="RECIPE", help=", ".join(RECIPES)
    )
    parser.add_argument("--steps", type=int, default=600, help="of the optimizer, batches of 64 (default 600)")
    parser.add_argument("--seeds", type=int, default=1, help="how many (default 1)")
    parser.add_argument("--compile", action="store_true", help='train under torch.compile(backend="sparse")')
    add_files(parser)
    return parser.parse_args()


def main() -> None:
    given, rows = arguments(), list[Row]()
    print(f"| recipe, {given.network}, {given.steps} steps | accuracy, mean of {given.seeds} | deviation |\n|---|--:|--:|")
    for name in given.recipes:
        found = []
        for seed in range(given.seeds):
            accuracy, of_run = train(given.network, name, seed, given.steps, given.compile)
            found.append(accuracy)
            rows += of_run
        print(f"| {name} | {statistics.mean(found):.2f} | {statistics.pstdev(found):.2f} |", flush=True)
    write(rows, given)


if __name__ == "__main__":
    main()
