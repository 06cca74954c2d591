"""Make a sparse sentence encoder that is still accurate: all-MiniLM-L6-v2, pruned with calibration, then distilled from itself.

Its texts are the definitions, examples and words of WordNet, without the synsets that `reverse_dictionary.py` holds out; the
result is compared on those. The layers hold their nonzeros alone while they learn, and their steps are compiled; nonzeros move
to where gradients are large. It goes on where it was broken off. 5,000 steps take an hour to an hour and a half on one core.
The file beside this one is of three runs, each begun from the last: 5,000 steps when nonzeros did not move here yet, 4,500, and
1,600 with `--moving 0.05 --learning-rate 3e-4`.
At 90 %, 2,600 steps from that file on end at an MRR of 39.14 (dense 41.29).

    pip install '.[examples]'
    python examples/sparse_minilm.py --sparsity 0.8 --out examples/sources/sparse_minilm.safetensors
    python examples/sparse_minilm.py --sparsity 0.9 --begin examples/sources/sparse_minilm.safetensors --out sparser.safetensors
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.nn.functional as F
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from sources import reverse_dictionary, sentence_encoder, wordnet  # type: ignore[import-not-found]
    from sources.sentence_encoder import SentenceEncoder, batches, embed, load_encoder  # type: ignore[import-not-found]
    from torch import Tensor, nn

    import gossamer
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs the package '{missing.name}': pip install '.[examples]' in the repository")

_CALIBRATION = 1024  # definitions
_WARM_UP = 20  # steps
_AT_ONCE = 50  # batches that are drawn together, so that texts of like length meet
_LENGTHS = 8  # tokens are padded to a multiple, so that a few graphs serve all batches


class InBfloat16(nn.Module):
    """A teacher that computes in bfloat16, whose error is nothing beside what its student lacks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(**batch)


def texts() -> tuple[list[str], list[str]]:
    """Definitions for calibration, and all texts for training; nothing of them is held out."""
    known = wordnet.load()
    held_out = {text for part in reverse_dictionary.held_out() for text in part}
    definitions = [gloss.split(";")[0].strip() for gloss in known.glosses]
    quoted = [part.strip(' "') for gloss in known.glosses for part in gloss.split(";")[1:] if part.strip().startswith('"')]
    rest = sorted({text for text in (*definitions, *quoted, *known.words) if text and text not in held_out})
    random.Random(0).shuffle(rest)
    calibration = [text for text in definitions if text not in held_out]
    return random.Random(0).sample(calibration, _CALIBRATION), rest


def stream(tokenizer: Any, rest: list[str], size: int) -> Iterator[dict[str, Tensor]]:
    """Batches without end, in the same order in every run."""
    for epoch in itertools.count():
        order = random.Random(epoch)
        mixed = order.sample(rest, len(rest))
        for at in range(0, len(mixed), size * _AT_ONCE):
            drawn = batches(tokenizer, mixed[at : at + size * _AT_ONCE], size)
            order.shuffle(drawn)
            yield from (padded(batch) for _, batch in drawn)


def padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ids and attention mask with zeros behind them."""
    more = -batch["input_ids"].shape[1] % _LENGTHS
    return {name: F.pad(part, (0, more)) for name, part in batch.items()}


def unfinished_of(args: argparse.Namespace) -> Path:
    """Where a run is kept until it is done."""
    return args.out.with_suffix(".unfinished.pt")


def distill(encoder: SentenceEncoder, teacher: SentenceEncoder, drawn: Iterator[dict[str, Tensor]], args: Any) -> None:
    """Teaches the layers hidden states and embeddings of the dense encoder. They store nonzeros alone, which move (RigL)."""

    def embedding(output: Any, call: Any) -> Tensor:
        return sentence_encoder.pooled(output.last_hidden_state, call.kwargs["attention_mask"])

    loss = gossamer.DistillationLoss(hidden=args.hidden, embeddings=args.embeddings, embed=embedding)
    encoder.bert.embeddings.requires_grad_(False)  # they are not in the file
    gossamer.store_sparse(encoder.bert.encoder)
    student: Any = torch.compile(encoder.bert, backend="sparse", dynamic=False)
    source = InBfloat16(teacher.bert)
    trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=0, fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / _WARM_UP) * (1 - step / args.steps))
    moving = gossamer.train_sparse(
        encoder.bert.encoder, optimizer, "rigl", steps=args.steps, sparsity=args.sparsity, fraction=args.moving
    )
    unfinished, done = unfinished_of(args), 0
    if unfinished.exists():
        kept = torch.load(unfinished)
        encoder.load_state_dict(kept["encoder"])
        optimizer.load_state_dict(kept["optimizer"])
        rate.load_state_dict(kept["rate"])
        moving.load_state_dict(kept["moving"])
        done = kept["done"]
    columns = ("distilling", BarColumn(), TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]:.4f}"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        bar = progress.add_task("", total=args.steps, completed=done, loss=float("nan"))
        for step, batch in enumerate(itertools.islice(drawn, args.steps)):
            if step < done:
                continue
            optimizer.zero_grad()
            found = loss(student, source, batch)
            found.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            rate.step()
            progress.update(bar, advance=1, loss=float(found.detach()))
            if (step + 1) % args.keep_every == 0:
                parts = {"encoder": encoder, "optimizer": optimizer, "rate": rate, "moving": moving}
                state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
                torch.save(state | {"done": step + 1}, unfinished.with_suffix(".part"))
                unfinished.with_suffix(".part").replace(unfinished)
    moving.detach()
    gossamer.finalize(encoder)
    unfinished.unlink(missing_ok=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sparsity", type=float, default=0.8, help="share of zeros in the encoder's Linears (default 0.8)")
    parser.add_argument("--steps", type=int, default=5000, help="of distillation (default 5000)")
    parser.add_argument("--batch", type=int, default=96, help="texts a step (default 96)")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of AdamW at its highest (default 5e-4)")
    parser.add_argument(
        "--moving", type=float, default=0.1, help="share of nonzeros that move at first, each 100 steps (default 0.1)"
    )
    parser.add_argument("--hidden", type=float, default=1.0, help="weight of hidden states in the loss (default 1)")
    parser.add_argument("--embeddings", type=float, default=3.0, help="weight of embeddings in the loss (default 3)")
    parser.add_argument("--begin", type=Path, help="file of layers to begin with (default: the dense ones)")
    parser.add_argument("--keep-every", type=int, default=50, help="steps between two that are kept (default 50)")
    parser.add_argument("--out", type=Path, default=Path("sparse_minilm.safetensors"), help="file of the sparse layers")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    teacher, tokenizer = load_encoder()
    calibration, rest = texts()
    show, dense = reverse_dictionary.quality(partial(embed, teacher, tokenizer), torch.empty(0))
    print(f"{len(rest):,} texts\ndense       {show}")

    encoder = copy.deepcopy(teacher)
    if args.begin:
        gossamer.load(encoder.bert.encoder, args.begin)
    if not unfinished_of(args).exists():
        print(gossamer.prune(encoder, [batch for _, batch in batches(tokenizer, calibration, 128)], args.sparsity))
        print(f"pruned      {reverse_dictionary.quality(partial(embed, encoder, tokenizer), dense)[0]}")
    distill(encoder, teacher, stream(tokenizer, rest, args.batch), args)
    print(f"distilled   {reverse_dictionary.quality(partial(embed, encoder, tokenizer), dense)[0]}")

    halves = encoder.bert.encoder.half()
    size = gossamer.save(halves, args.out)
    print(f"stored      {reverse_dictionary.quality(partial(embed, encoder.float(), tokenizer), dense)[0]}")
    print(f"{args.out}: {size / 2**20:.1f} MiB, sparse layers in float16")


if __name__ == "__main__":
    main()
