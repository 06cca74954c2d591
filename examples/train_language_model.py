"""Train a small transformer on Python's own manual, letter by letter: dense, sparse by RigL, 2:4 by STEP.

    pip install '.[examples]'
    python examples/train_language_model.py --steps 1000 --compile --csv losses.csv
    python examples/train_language_model.py --recipes dense rigl --sparsity 0.8

Prints the loss on text that was not trained on, in nats a letter, and the seconds that training took, with compilation. RigL
and gradual store nonzeros alone (`store=True`), so their steps are shorter: give them more to compare at equal time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_digits import Row, add_files, write  # type: ignore[import-not-found]  # beside this file

import gossamer

TOKENS, BATCH = 64, 16
TESTED = 0.05  # of the text, its end


class Layer(nn.Module):
    """A pre-norm transformer layer that sees what came before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """float32 [batch, tokens, width], the same"""
        q, k, v = self.inputs(self.before_attention(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.outputs(attended)
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class LanguageModel(nn.Module):
    """Letters, int64 [batch, tokens] → scores of the next one, float32 [batch, tokens, letters]."""

    def __init__(self, letters: int, layers: int, width: int) -> None:
        super().__init__()
        self.letters, self.positions = nn.Embedding(letters, width), nn.Parameter(0.02 * torch.randn(TOKENS, width))
        self.layers = nn.Sequential(*(Layer(width, max(1, width // 64)) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, ids: Tensor) -> Tensor:
        """ids as above"""
        scores: Tensor = self.head(self.norm(self.layers(self.letters(ids) + self.positions)))
        return scores


def text() -> tuple[Tensor, int]:
    """The manual as numbers of letters, and how many letters there are."""
    manual = "\n".join(topics.values())
    letters = {letter: number for number, letter in enumerate(sorted(set(manual)))}
    return torch.tensor([letters[letter] for letter in manual]), len(letters)


def loss_of(model: Any, ids: Tensor, starts: Tensor) -> Tensor:
    """The mean over windows of the text that start there."""
    windows = torch.stack([ids[start : start + TOKENS + 1] for start in starts.tolist()])
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(name: str, given: argparse.Namespace) -> tuple[float, list[float], list[Row]]:
    """Loss on the end of the text, the seconds of each step, and the rows of the CSV."""
    torch.manual_seed(0)
    ids, letters = text()
    tested = int((1 - TESTED) * len(ids))
    model = LanguageModel(letters, given.layers, given.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
    every = max(1, given.steps // 40)
    options: dict[str, Any] = {
        "step": {"pattern": "2:4"},
        "rigl": {"sparsity": given.sparsity, "every": every, "store": True},
        "gradual": {"sparsity": given.sparsity, "every": every, "store": True},
    }.get(name, {})
    training = None
    if name != "dense":
        training = gossamer.train_sparse(model, optimizer, name, steps=given.steps, skip="head", **options)
    call = torch.compile(model, backend="sparse") if given.compile else model
    rows, took = list[Row](), list[float]()
    for step in range(given.steps):
        begun = time.perf_counter()
        loss = loss_of(call, ids, torch.randint(tested - TOKENS - 1, (BATCH,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        took.append(time.perf_counter() - begun)
        if step % every == 0 or step == given.steps - 1:
            print(f"\r  {name}: step {step + 1} of {given.steps}, loss {loss.item():.3f}", end="", flush=True)
            densities = {"all": 1.0} if training is None else training.densities()
            rows += [(name, 0, step, layer, density, loss.item()) for layer, density in densities.items()]
    if training is not None:
        training.detach()
    with torch.no_grad():
        starts = torch.arange(tested, len(ids) - TOKENS - 1, TOKENS)
        found = torch.stack([loss_of(model, ids, part) for part in starts.split(BATCH)]).mean()
    return found.item(), took, rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    recipes = ["dense", "rigl", "gradual", "step"]
    parser.add_argument("--recipes", nargs="+", choices=recipes, default=recipes)
    parser.add_argument("--sparsity", type=float, default=0.9, help="of rigl and gradual (default 0.9)")
    parser.add_argument("--steps", type=int, default=500, help=f"of {BATCH} windows of {TOKENS} letters (default 500)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384, help="of which a head of attention has 64")
    parser.add_argument("--compile", action="store_true", help='train under torch.compile(backend="sparse")')
    add_files(parser)
    return parser.parse_args()


def main() -> None:
    given, rows = arguments(), list[Row]()
    for name in given.recipes:
        loss, took, of_run = train(name, given)
        time_taken = f"{sum(took):.1f} s, mostly {1e3 * statistics.median(took):.0f} ms a step"
        print(f"\r{name:<10} {loss:7.4f} nats a letter after {given.steps} steps, {time_taken}{'':9}")
        rows += of_run
    write(rows, given)


if __name__ == "__main__":
    main()
