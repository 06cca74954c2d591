"""Serve many adapters in one batch: a pruned language model with a LoRA adapter for each part of Python's own manual.

    pip install '.[examples]'
    python examples/many_adapters.py
    python examples/many_adapters.py --adapters 32 --rank 64 --report

A small model learns the whole manual, letter by letter, and loses 90 % of the weights of its layers. Then each adapter learns
one part of the manual, all of them in the same batches: `who` says which adapter each sequence has. Prints the loss on text
that was not trained on (without adapters, with the right ones, with wrong ones), and the milliseconds of a batch: eager,
Inductor, Gossamer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_language_model import TESTED, TOKENS, LanguageModel, Layer  # type: ignore[import-not-found]  # beside this file

import gossamer

Call = Callable[[Tensor, Tensor | None], Tensor]


class Adapted(nn.Module):
    """A frozen layer, and a product of two narrow matrices beside it for each adapter."""

    def __init__(self, base: nn.Linear, adapters: int, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(adapters, base.in_features, rank) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(adapters, rank, base.out_features))

    def forward(self, x: Tensor, who: Tensor | None) -> Tensor:
        """x [sequences, tokens, features], who int64 [sequences]"""
        y: Tensor = self.base(x)
        return y if who is None else y + torch.bmm(torch.bmm(x, self.down[who]), self.up[who])


class Served(nn.Module):
    """A language model whose layers after attention have adapters."""

    def __init__(self, model: LanguageModel, adapters: int, rank: int) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.ups = nn.ModuleList(Adapted(layer.up, adapters, rank) for layer in model.layers)
        self.downs = nn.ModuleList(Adapted(layer.down, adapters, rank) for layer in model.layers)

    def forward(self, ids: Tensor, who: Tensor | None) -> Tensor:
        """Scores of the next letter; without `who` those of the model alone."""
        x = self.model.letters(ids) + self.model.positions
        for layer, up, down in zip(self.model.layers, self.ups, self.downs, strict=True):
            x = attended(layer, x)
            x = x + down(F.gelu(up(layer.before_mlp(x), who)), who)
        scores: Tensor = self.model.head(self.model.norm(x))
        return scores


def attended(layer: Layer, x: Tensor) -> Tensor:
    """The first half of a layer."""
    q, k, v = layer.inputs(layer.before_attention(x)).unflatten(2, (3, layer.heads, -1)).permute(2, 0, 3, 1, 4)
    mixed: Tensor = layer.outputs(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    return x + mixed


def parts(count: int) -> tuple[list[Tensor], int]:
    """The manual in so many parts of about the same length, as numbers of letters, and how many letters there are."""
    text = "".join(topics[name] for name in sorted(topics))
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(letter) for letter in text])
    return list(ids.chunk(count)), len(letters)


def windows(ids: Sequence[Tensor], who: Tensor, generator: torch.Generator, tested: bool = False) -> Tensor:
    """A window of the part of each sequence, from its end if it is `tested`."""
    found = []
    for part in (ids[number] for number in who.tolist()):
        split = int((1 - TESTED) * len(part))
        low, high = (split, len(part)) if tested else (0, split)
        start = low + int(torch.randint(high - low - TOKENS - 1, (1,), generator=generator))
        found.append(part[start : start + TOKENS + 1])
    return torch.stack(found)


def loss_of(call: Call, given: Tensor, who: Tensor | None) -> Tensor:
    """The mean over all letters, in nats."""
    return F.cross_entropy(call(given[:, :-1], who).flatten(0, 1), given[:, 1:].flatten())


def train(call: Call, parameters: list[nn.Parameter], ids: list[Tensor], batch: int, steps: int, adapted: bool) -> None:
    """Trains in place, with an adapter for each part or without."""
    generator, optimizer = torch.Generator().manual_seed(0), torch.optim.AdamW(parameters, lr=3e-3)
    for _ in range(steps):
        who = torch.randint(len(ids), (batch,), generator=generator)
        loss = loss_of(call, windows(ids, who, generator), who if adapted else None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def milliseconds(calls: dict[str, Call], given: Tensor, who: Tensor, rounds: int) -> dict[str, float]:
    """The median of each, in turns."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(rounds + 2):
            for name, call in calls.items():
                begun = time.perf_counter()
                call(given, who)
                took[name].append(time.perf_counter() - begun)
    return {name: 1e3 * statistics.median(times[2:]) for name, times in took.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("adapters", 16), ("rank", 64), ("batch", 32), ("width", 256), ("layers", 2), ("steps", 150), ("rounds", 20),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--report", action="store_true", help="print what became of each layer")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.manual_seed(0)
    ids, letters = parts(given.adapters)
    model = LanguageModel(letters, given.layers, given.width)
    served = Served(model, given.adapters, given.rank)
    model.requires_grad_(True)
    train(served, list(model.parameters()), ids, given.batch, given.steps, adapted=False)
    generator = torch.Generator().manual_seed(1)
    samples = [windows(ids, torch.randint(len(ids), (8,), generator=generator), generator)[:, :-1] for _ in range(4)]
    gossamer.prune(model.layers, [model.letters(each) + model.positions for each in samples], sparsity=0.9)
    model.requires_grad_(False)
    factors = [parameter for parameter in served.parameters() if parameter.requires_grad]
    train(served, factors, ids, given.batch, given.steps, adapted=True)

    who = torch.arange(given.batch) % given.adapters
    tested = windows(ids, who, generator, tested=True)
    with torch.no_grad():
        for name, chosen in (("no adapters", None), ("its adapter", who), ("another's", who.roll(1))):
            print(f"loss with {name:12} {loss_of(served, tested, chosen).item():.3f} nats a letter")
    served.eval()
    calls: dict[str, Call] = {
        "eager": served,
        "Inductor": torch.compile(served),
        "Gossamer": torch.compile(served, backend="sparse"),
    }
    with torch.no_grad():
        torch.testing.assert_close(calls["Gossamer"](tested[:, :-1], who), served(tested[:, :-1], who), rtol=1e-3, atol=1e-3)
    for name, ms in milliseconds(calls, tested[:, :-1], who, given.rounds).items():
        print(f"{name:10} {ms:8.2f} ms for {given.batch} sequences of {TOKENS} letters, {given.adapters} adapters")
    if given.report:
        with torch.no_grad():
            print(gossamer.explain(served, tested[:, :-1], who))


if __name__ == "__main__":
    main()
