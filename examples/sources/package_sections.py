"""Which section does a package belong to? Those that are installed on a Debian system, by their one-line descriptions."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST = 100
"""Packages that it takes to say anything."""

_MEMBERS = 5  # of a section, at least


@dataclass(frozen=True)
class Sections:
    """Shares in percent: of packages whose nearest other one is of their section, and of those whose nearest is the dense
    model's, too."""

    same_section: float
    same_neighbour: float

    def __str__(self) -> str:
        return f"section {self.same_section:4.1f} %   nearest as dense {self.same_neighbour:5.1f} %"


def installed() -> tuple[list[str], list[str]]:
    """Sections and descriptions, each description once; nothing where there is no dpkg."""
    if shutil.which("dpkg-query") is None:
        return [], []
    listed = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Section}\\t${binary:Summary}\\n"],
        capture_output=True,
        text=True,
        check=True,
    )
    of_text = {text: section for section, _, text in (line.partition("\t") for line in listed.stdout.splitlines()) if text}
    members = Counter(of_text.values())
    kept = [(section, text) for text, section in of_text.items() if members[section] >= _MEMBERS]
    return [section for section, _ in kept], [text for _, text in kept]


def quality(
    embed: Callable[[list[str]], Tensor], sections: list[str], descriptions: list[str], dense: Tensor
) -> tuple[Sections, Tensor]:
    """Of a model that makes unit-length embeddings of texts; also the nearest other package of each.

    dense  the nearest ones by another model; an empty tensor stands for this model's own
    """
    rows = embed(descriptions)
    nearest = (rows @ rows.T).fill_diagonal_(-1).argmax(1)
    numbers = {section: number for number, section in enumerate(sorted(set(sections)))}
    labels = torch.tensor([numbers[section] for section in sections])
    same = (labels == labels[nearest]).double().mean()
    agreed = (nearest == (dense if len(dense) else nearest)).double().mean()
    return Sections(100 * float(same), 100 * float(agreed)), nearest
