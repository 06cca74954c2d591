"""A reverse dictionary: which of 3,000 words does a definition mean? Synsets of WordNet 3.1 that are held out.

python examples/sources/reverse_dictionary.py      draws the synsets anew (wordnet.py says where from)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

HELD_OUT = Path(__file__).with_name("reverse_dictionary.tsv")
SYNSETS = 3000


@dataclass(frozen=True)
class Quality:
    """How well definitions find their words: shares in percent, and the mean cosine to another model's embeddings."""

    reciprocal_rank: float
    first: float
    among_ten: float
    cosine: float

    def __str__(self) -> str:
        shares = f"top 1 {self.first:4.1f} %   top 10 {self.among_ten:4.1f} %"
        return f"MRR {self.reciprocal_rank:5.2f}   {shares}   cosine {self.cosine:.3f}"


def held_out() -> tuple[list[str], list[str]]:
    """Words and their definitions, as many of each."""
    lines = [line.split("\t") for line in HELD_OUT.read_text(encoding="utf-8").splitlines() if not line.startswith("# ")]
    return [word for word, _ in lines], [definition for _, definition in lines]


def quality(embed: Callable[[list[str]], Tensor], dense: Tensor) -> tuple[Quality, Tensor]:
    """Of a model that makes unit-length embeddings [texts, features] of texts; also its embeddings of the definitions.

    dense  another model's embeddings of the definitions; an empty tensor stands for this model's own
    """
    words, definitions = (embed(texts) for texts in held_out())
    scores = definitions @ words.T
    rank = (scores > scores.diag()[:, None]).sum(1) + 1
    cosine = (definitions * (dense if len(dense) else definitions)).sum(1).mean()
    mean, first, ten = (100 * float(share.double().mean()) for share in (1 / rank, rank == 1, rank <= 10))
    return Quality(mean, first, ten, float(cosine)), definitions


def main() -> None:
    import wordnet  # type: ignore[import-not-found]  # beside this file

    known = wordnet.load()
    pairs = [(word, gloss.split(";")[0].strip()) for word, gloss in zip(known.words, known.glosses, strict=True)]
    pairs = [pair for pair in pairs if 15 < len(pair[1]) < 200]
    random.Random(0).shuffle(pairs)
    lines = [*(f"# {line}" for line in wordnet.licence()), *("\t".join(pair) for pair in pairs[:SYNSETS])]
    HELD_OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{SYNSETS} of {len(pairs)} synsets are in {HELD_OUT}")


if __name__ == "__main__":
    main()
