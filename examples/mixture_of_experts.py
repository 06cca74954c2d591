"""Train a small mixture of experts on Python's own manual, letter by letter, and let it write: eager, Inductor, Gossamer.

    pip install '.[examples]'
    python examples/mixture_of_experts.py
    python examples/mixture_of_experts.py --experts 64 --top 8 --steps 500

A router sends each letter to `--top` of the `--experts` of a layer (Qwen3-MoE of transformers, made small). Gossamer finds the
experts as the model has them written, and runs each layer as one operation. Prints the milliseconds of a step, the loss on text
that was not trained on, the letters that each writes a second,
and what they write; with `--report`, what became of each layer.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_language_model import BATCH, TESTED, TOKENS, text  # type: ignore[import-not-found]  # beside this file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import gossamer


def model_of(letters: int, given: argparse.Namespace) -> nn.Module:
    """The model, the same each time."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=letters, hidden_size=given.width, num_hidden_layers=given.layers, num_attention_heads=4,
        num_key_value_heads=4, head_dim=given.width // 4, moe_intermediate_size=given.width, num_experts=given.experts,
        num_experts_per_tok=given.top, norm_topk_prob=True, max_position_embeddings=TOKENS, use_cache=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def loss_of(call: Any, ids: Tensor, starts: Tensor) -> Tensor:
    """The mean over windows of the text that start there."""
    windows = torch.stack([ids[start : start + TOKENS + 1] for start in starts.tolist()])
    out = call(input_ids=windows[:, :-1])
    return F.cross_entropy(out.logits.flatten(0, 1), windows[:, 1:].flatten())


def train(model: nn.Module, call: Any, ids: Tensor, steps: int) -> float:
    """Trains in place. The milliseconds of the median step, without the first, which compiles."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, fused=True)
    tested, took = int((1 - TESTED) * len(ids)), list[float]()
    for _ in range(steps):
        begun = time.perf_counter()
        loss = loss_of(call, ids, torch.randint(tested - TOKENS - 1, (BATCH,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        took.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(took[1:] or took)


@torch.no_grad()
def write(call: Any, prompt: Tensor, count: int) -> tuple[Tensor, float]:
    """So many letters more, each drawn from what the model expects after the last ones; and how many it wrote a second."""
    generator, ids = torch.Generator().manual_seed(1), prompt
    call(input_ids=ids[-TOKENS:][None])  # compiles
    begun = time.perf_counter()
    for _ in range(count):
        scores = call(input_ids=ids[-TOKENS:][None]).logits[0, -1]
        ids = torch.cat([ids, torch.multinomial((scores / 0.7).softmax(0), 1, generator=generator)])
    return ids[len(prompt) :], count / (time.perf_counter() - begun)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--experts", type=int, default=16, help="of a layer (default 16)")
    parser.add_argument("--top", type=int, default=2, help="experts of a letter (default 2)")
    parser.add_argument("--steps", type=int, default=60, help=f"of {BATCH} windows of {TOKENS} letters (default 60)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--report", action="store_true", help="print what became of each layer")
    parser.add_argument("--letters", type=int, default=120, help="to be written (default 120)")
    return parser.parse_args()


def main() -> None:
    warnings.filterwarnings("ignore", module="torch._inductor")
    given, (ids, letters) = arguments(), text()
    alphabet = sorted(set("\n".join(topics.values())))
    tested = int((1 - TESTED) * len(ids))
    starts, prompt = torch.arange(tested, len(ids) - TOKENS - 1, 4 * TOKENS)[:BATCH], ids[tested : tested + TOKENS]
    ways: dict[str, Callable[[Any], Any]] = {
        "eager": lambda forward: forward,
        "Inductor": torch.compile,
        "Gossamer": lambda forward: torch.compile(forward, backend="sparse"),
    }
    begin = model_of(letters, given)
    print(f"{sum(p.numel() for p in begin.parameters()) / 1e6:.1f} million parameters, {given.top} of {given.experts} experts")
    for name, way in ways.items():
        torch.compiler.reset()
        model: Any = copy.deepcopy(begin)
        call = way(model.forward)
        step = train(model, call, ids, given.steps)
        model.eval()
        written, speed = write(call, prompt, given.letters)
        with torch.no_grad():
            loss = loss_of(model, ids, starts).item()
        print(f"{name:<9} {step:7.1f} ms a step, {loss:.3f} nats a letter, {speed:6.1f} letters a second", flush=True)
        print("  " + "".join(alphabet[n] for n in written.tolist()).replace("\n", "\n  "))
    if given.report:
        print(gossamer.explain(begin.eval(), input_ids=prompt[None]))


if __name__ == "__main__":
    main()
