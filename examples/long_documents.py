"""Attention over long documents: an encoder like Longformer's reads Python's manual, and each token sees its neighbours.

The mask is a window of 64 tokens to each side, and one token that sees all and is seen by all (Beltagy, Peters and Cohan,
"Longformer", 2020). The model computes it from positions and gives it to scaled_dot_product_attention. The example compares
Gossamer and FlexAttention with dense attention, which is the same function in eager PyTorch: time, memory, and the largest
difference of the results. Weights are random.

    pip install '.[examples]'
    python examples/long_documents.py --lengths 4096,8192,16384 --plot attention.png
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    import gossamer
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs the package '{missing.name}': pip install '.[examples]' in the repository")

WINDOW, WIDTH, HEADS, LAYERS = 64, 256, 8, 2
DENSE = "dense attention"


def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The mask, as FlexAttention wants it."""
    return ((q - k).abs() <= WINDOW) | (q < 1) | (k < 1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, heads, tokens, size] → the same"""
    i = torch.arange(q.shape[2])
    near = (i[:, None] - i).abs() <= WINDOW
    return F.scaled_dot_product_attention(q, k, v, attn_mask=near | (i < 1) | (i < 1)[:, None])


class Layer(nn.Module):
    """Pre-norm, without positions: the window is what tells where a token is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Numbers of words [batch, tokens] → hidden states [batch, tokens, WIDTH]"""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def forward(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.layers(self.embed(words))
        return hidden


def document(length: int) -> Tensor:
    """The first words of the topics of Python's manual, one after the other, as numbers [1, length]."""
    numbers: dict[str, int] = {"": 0}  # the token that sees all
    words = "\n".join(topics.values()).split()[: length - 1]
    return torch.tensor([[0, *(numbers.setdefault(word, len(numbers)) for word in words)]])


def milliseconds(call: Callable[[], object], times: int = 3) -> float:
    """The least of some calls after one that compiles."""
    call()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - start))
    return min(taken)


def peak() -> float:
    """The most memory that this process has had so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measured(length: int) -> dict[str, float]:
    """Milliseconds of attention alone, compared with dense attention.

    Memory is how much the peak of the process grows, so those that need more come later, and dense attention is the last.
    """
    q, k, v = (torch.randn(1, HEADS, length, WIDTH // HEADS) for _ in range(3))
    ours = torch.compile(attention, backend="sparse", dynamic=False)
    mask = create_block_mask(sees, None, None, length, length, device="cpu")
    flex = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), dynamic=False)
    times, memory, results = {}, {}, {}
    for name, call in (("Gossamer", ours), ("FlexAttention", flex), (DENSE, attention)):
        before = peak()
        times[name] = milliseconds(partial(call, q, k, v))
        memory[name], results[name] = peak() - before, call(q, k, v)
    for name, ms in times.items():
        error = float((results[name] - results[DENSE]).abs().max())
        against = "" if name == DENSE else f", {times[DENSE] / ms:5.1f}x as fast, differs by {error:.0e}"
        print(f"  {name:<16} {ms:8.1f} ms, {memory[name]:7.0f} MB more at the most{against}")
        if not error < 1e-4:
            sys.exit("the results differ")
    return times


def plot(lengths: list[int], times: list[dict[str, float]], path: Path) -> None:
    """Time over length, both logarithmic."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    for name in times[0]:
        axes.loglog(lengths, [found[name] for found in times], marker="o", label=name)
    axes.set(xlabel="tokens", ylabel="ms", title=f"attention, window {WINDOW} and one global token")
    axes.legend()
    figure.savefig(path)
    print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--lengths", default="4096,8192,16384", help="tokens (default 4096,8192,16384)")
    parser.add_argument("--plot", type=Path, help="where to draw time over length (needs matplotlib)")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]

    torch.manual_seed(0)
    with torch.no_grad():
        times = []
        for length in lengths:
            print(f"attention over {length:,} tokens, {HEADS} heads of {WIDTH // HEADS}:")
            times.append(measured(length))
            torch.compiler.reset()
        words = document(lengths[0])
        model = Encoder(int(words.max()) + 1).eval()
        print(f"the encoder, {LAYERS} layers of {WIDTH}, on {words.shape[1]:,} words of Python's manual:")
        print(gossamer.explain(model, words))
        ours = torch.compile(model, backend="sparse")
        error = float((ours(words) - model(words)).abs().max())
        print(f"  Gossamer {milliseconds(lambda: ours(words)):.1f} ms, eager {milliseconds(lambda: model(words)):.1f} ms")
        print(f"  the results differ by {error:.0e}")
        if not error < 1e-3:
            sys.exit("the results differ")
    if args.plot:
        plot(lengths, times, args.plot)


if __name__ == "__main__":
    main()
