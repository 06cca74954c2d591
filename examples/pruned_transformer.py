"""Speed up a sparse sentence encoder with one line: `torch.compile(encoder, backend="sparse")`.

Loads the real all-MiniLM-L6-v2 (no network needed) and the layers that `sparse_minilm.py` made sparse by calibrated pruning
and distillation, and stored beside it; or, with --sparsity, zeroes the smallest weights in one step. Shows what the compiler
decided for every layer, that the embeddings agree with a dense run, how well both find words by their definitions and tell
where packages belong, what they find in Python's own manual, and how fast the model is beside dense eager and Inductor, in
int8, too.

    pip install '.[examples]'
    python examples/pruned_transformer.py --batch 8 --tokens 128 --threads 1
    python examples/pruned_transformer.py --sparsity 0.95
    python examples/pruned_transformer.py --plot quality.png
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

try:
    from pydoc_data.topics import topics

    import torch
    import torch.nn.functional as F
    from sources import package_sections, reverse_dictionary, sentence_encoder  # type: ignore[import-not-found]
    from sources.sentence_encoder import load_encoder, tokenize  # type: ignore[import-not-found]
    from torch import Tensor, nn
    from torch._inductor.exc import InductorError

    import gossamer
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs the package '{missing.name}': pip install '.[examples]' in the repository")

QUERIES = (
    "skip the rest of this iteration and go on with the next one",
    "an error was raised and the open file must still be closed",
)
STORED = Path(__file__).parent / "sources" / "sparse_minilm.safetensors"
TOLERANCE = 1e-4  # allowed between an entry of the compiled and of the dense embedding, which has length 1

CALIBRATION = 256  # passages of the manual that pruning in one step looks at

Embed = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def prune(encoder: nn.Module, sparsity: float) -> None:
    """Zero, in place, the smallest weights of each Linear, a share of `sparsity`."""
    for linear in encoder.modules():
        if isinstance(linear, nn.Linear):
            weight = linear.weight.view(-1)
            weight[weight.abs().argsort()[: int(sparsity * weight.numel())]] = 0


@torch.no_grad()
def embed(model: Embed, tokenizer: Any, texts: Sequence[str], batch: int, tokens: int) -> Tensor:
    """Embeddings [len(texts), 384], from calls of one shape (the last is filled up), so compiled once."""
    filled = [*texts, *[texts[-1]] * (-len(texts) % batch)]
    ids, mask = tokenize(tokenizer, filled, tokens)
    parts = [model(i, m) for i, m in zip(ids.split(batch), mask.split(batch), strict=True)]
    return torch.cat(parts)[: len(texts)]


@torch.no_grad()
def latencies(models: dict[str, Embed], inputs: tuple[Tensor, Tensor], repeats: int) -> dict[str, float]:
    """Median milliseconds of each model; they take turns, so a busy machine disturbs all of them alike."""
    samples: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(repeats + 2):
        for name, model in models.items():
            start = time.perf_counter()
            model(*inputs)
            samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times[2:]) for name, times in samples.items()}


@torch.no_grad()
def compiled(model: nn.Module, backend: str, inputs: tuple[Tensor, Tensor]) -> tuple[Embed, float]:
    """The model compiled by `backend` (here, on its first call) and the seconds that took."""
    start = time.perf_counter()
    fast = torch.compile(model, backend=backend)
    fast(*inputs)
    return fast, time.perf_counter() - start


def nearest(query: Tensor, passages: Tensor, names: Sequence[str]) -> str:
    """The three passages nearest to the query, with their cosine."""
    cosines = passages @ query
    return "   ".join(f"{names[i]} {cosines[i]:.2f}" for i in cosines.topk(3).indices.tolist())


def heading(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


def show_retrieval(found: dict[str, tuple[Tensor, Tensor]], names: Sequence[str]) -> None:
    heading("What it finds in Python's manual (topic, cosine)")
    for i, query in enumerate(QUERIES):
        print(f"  “{query}”")
        for name, (queries, passages) in found.items():
            print(f"    {name:<15}{nearest(queries[i], passages, names)}")


def show_latency(median: dict[str, float], compile_seconds: dict[str, float]) -> None:
    slowest = max(median.values())
    for name, ms in median.items():
        bar = "█" * max(1, round(30 * ms / slowest))
        compiling = f"   compiled in {compile_seconds[name]:.1f} s" if name in compile_seconds else ""
        print(f"  {name:<15}{ms:8.2f} ms  {median['dense eager'] / ms:5.2f}x  {bar:<30}{compiling}")


def calibrated(dense: nn.Module, tokenizer: Any, sparsity: float) -> nn.Module:
    """The dense encoder pruned in one step that looks at sentences of Python's manual, and trains nothing."""
    sentences = [part.strip() for text in topics.values() for part in text.split(".") if 40 < len(part.strip()) < 200]
    texts = sentences[:: max(1, len(sentences) // CALIBRATION)][:CALIBRATION]
    encoder = copy.deepcopy(dense)
    gossamer.prune(encoder, [rows for _, rows in sentence_encoder.batches(tokenizer, texts, 64)], sparsity)
    return encoder


def show_quality(encoders: dict[str, nn.Module], tokenizer: Any) -> dict[str, float]:
    """Prints both tasks for each encoder, the dense one first; the reciprocal ranks."""
    heading(f"How well definitions find their words, {reverse_dictionary.SYNSETS:,} of WordNet that no step has seen")
    ranks: dict[str, float] = {}
    dense = torch.empty(0)
    for name, encoder in encoders.items():
        found, embeddings = reverse_dictionary.quality(partial(sentence_encoder.embed, encoder, tokenizer), dense)
        dense, ranks[name] = dense if len(dense) else embeddings, found.reciprocal_rank
        print(f"  {name:<35}{found}", flush=True)
    sections, descriptions = package_sections.installed()
    if len(sections) < package_sections.LEAST:
        return ranks
    heading(f"Whether the nearest of {len(sections)} installed packages is of the same section, by descriptions")
    nearest = torch.empty(0)
    for name, encoder in encoders.items():
        embedded = partial(sentence_encoder.embed, encoder, tokenizer)
        told, own = package_sections.quality(embedded, sections, descriptions, nearest)
        nearest = nearest if len(nearest) else own
        print(f"  {name:<35}{told}", flush=True)
    return ranks


def plot(points: dict[str, tuple[float, float]], path: Path) -> None:
    """Quality over speed, a point for each variant."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, (speed, rank) in points.items():
        axes.plot(speed, rank, marker="o")
        axes.annotate(name, (speed, rank), xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set(xlabel="times as fast as dense PyTorch eager", ylabel="reverse dictionary, mean reciprocal rank (%)")
    axes.margins(x=0.25, y=0.1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"\nplot: {path}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sparsity", type=float, help="prune here, in one step, so large a share (default: the stored layers)")
    parser.add_argument("--batch", type=int, default=8, help="passages a call (default 8)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a passage, 3 to 512 (default 128)")
    threads = torch.get_num_threads()
    parser.add_argument("--threads", type=int, default=threads, help=f"CPU threads (default {threads})")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each model (default 20)")
    parser.add_argument("--plot", type=Path, help="where to draw quality over speed (needs matplotlib)")
    args = parser.parse_args()
    if args.sparsity is not None and not 0 <= args.sparsity < 1:
        parser.error(f"--sparsity is a share from 0 to below 1, not {args.sparsity}")
    if not 3 <= args.tokens <= 512:
        parser.error(f"--tokens must lie in 3 to 512, the positions MiniLM knows, not {args.tokens}")
    if min(args.batch, args.threads, args.repeats) < 1:
        parser.error("--batch, --threads and --repeats must be at least 1")
    return args


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore", module="torch|transformers")
    torch.set_num_threads(args.threads)
    names, passages = list(topics), list(topics.values())

    dense, tokenizer = load_encoder()
    encoder = copy.deepcopy(dense)
    if args.sparsity is None:
        gossamer.load(encoder.bert.encoder, STORED)
        how = "by calibration, then distilled (examples/sparse_minilm.py)"
    else:
        prune(encoder, args.sparsity)
        how = "the smallest, in one step"
    linears = [module for module in encoder.modules() if isinstance(module, nn.Linear)]
    weights = sum(linear.weight.numel() for linear in linears)
    zeros = sum(int((linear.weight == 0).sum()) for linear in linears)

    heading("A sparse transformer")
    print("  model    all-MiniLM-L6-v2, 6 BERT layers, float32")
    print(f"  pruned   {len(linears)} encoder Linears: {zeros / weights:.1%} of {weights:,} weights are 0; {how}")
    print(f"  input    {args.batch} x {args.tokens} tokens a call; {len(passages)} topics of Python's manual")
    print(f"  run on   {args.threads} thread{'s' * (args.threads > 1)}, PyTorch {torch.__version__}")

    batch = tokenize(tokenizer, [passages[i % len(passages)] for i in range(args.batch)], args.tokens)
    quantized = gossamer.quantize(copy.deepcopy(encoder))
    models: dict[str, Embed] = {"dense eager": encoder}
    compile_seconds: dict[str, float] = {}
    for name, backend, model in (
        ("Inductor", "inductor", encoder), ("Gossamer", "sparse", encoder), ("Gossamer int8", "sparse", quantized)
    ):  # fmt: skip
        print(f"\n  compiling with {name} …", end="", flush=True)
        try:
            models[name], compile_seconds[name] = compiled(model, backend, batch)
            print(f" {compile_seconds[name]:.1f} s", end="")
        except InductorError as error:
            if backend == "sparse":
                raise
            print(f" left out: {str(error).splitlines()[0]}", end="")  # it needs a C++ compiler
    print()

    heading("What Gossamer did")
    with torch.no_grad():
        print(gossamer.explain(encoder, *batch))

    texts = (*passages, *QUERIES)
    original, eager, sparse = (
        embed(model, tokenizer, texts, args.batch, args.tokens) for model in (dense, encoder, models["Gossamer"])
    )
    difference = (sparse - eager).abs().max().item()
    cosine = F.cosine_similarity(sparse.double(), eager.double()).min()
    heading(f"Agreement with the dense run of the same pruned weights, {len(texts)} embeddings")
    print(f"  largest difference {difference:.1e} (allowed {TOLERANCE:.0e}), smallest cosine {cosine:.9f}")

    at_once = copy.deepcopy(dense)
    prune(at_once, zeros / weights)
    encoders = {"not pruned": dense, "pruned by magnitude in one step": at_once}
    if args.sparsity is None:
        encoders["pruned by calibration in one step"] = calibrated(dense, tokenizer, zeros / weights)
        encoders["calibrated and distilled"] = encoder
        encoders["distilled, int8"] = quantized
    ranks = show_quality(encoders, tokenizer)

    found = {"not pruned": original, "pruned, dense": eager, "pruned, sparse": sparse}
    count = len(passages)
    show_retrieval({name: (rows[count:], rows[:count]) for name, rows in found.items()}, names)

    heading(f"Latency of {args.batch} x {args.tokens} tokens, median of {args.repeats} calls")
    median = latencies(models, batch, args.repeats)
    show_latency(median, compile_seconds)
    if args.plot:
        # How fast a sparse model is depends on how many zeros it has, and those in floats have equally many.
        run_by = {"not pruned": "Inductor" if "Inductor" in median else "dense eager", "distilled, int8": "Gossamer int8"}
        speeds = {name: median["dense eager"] / median[run_by.get(name, "Gossamer")] for name in ranks}
        plot({name: (speeds[name], rank) for name, rank in ranks.items()}, args.plot)

    if not difference <= TOLERANCE:
        sys.exit(f"The compiled model is off the dense one by {difference:.1e}; allowed is {TOLERANCE:.0e}.")


if __name__ == "__main__":
    main()
