"""Summarises where the nonzeros of a matrix lie, for pictures: density, rows, blocks, groups, and shares of threads.

The result has a few kilobytes for a matrix of any size. A NaN counts as a nonzero.
"""

import base64
from functools import cache
from math import comb
from typing import Any

import numpy as np
import torch

from gossamer.runtime.packers.nonzeros import nonzero_mask

_SIDE = 64
"""Longest side of the picture, in cells."""

_BINS = 32
BLOCKS = (1, 2, 4, 8, 16, 32, 64)
_GROUPS = ((1, 4), (2, 4), (1, 8), (2, 8), (4, 8), (2, 16), (4, 16), (8, 16))
_NEARLY = 0.95
"""Least share of groups that fit a pattern n:m for it to count as nearly found."""

_CHANCE = 20
"""A pattern that all groups fit counts as found if chance alone would give at least so many groups that do not fit."""

_MOST_ELEMENTS = 1 << 26
"""Most elements of a matrix for which a mask is made from the places of its nonzeros."""

Array = np.ndarray[Any, Any]


def pattern_of(weight: torch.Tensor, threads: int) -> dict[str, Any] | None:
    """Returns the pictures of a dense tensor. Of more than two dimensions, all but the first are flattened into columns.

    Returns None if the tensor is empty or has one dimension.
    """
    if weight.numel() == 0 or weight.dim() < 2:
        return None
    return _of_mask(nonzero_mask(weight.detach()).cpu().flatten(1).numpy(), threads)


def pattern_of_places(rows: torch.Tensor, columns: torch.Tensor, shape: tuple[int, int], threads: int) -> dict[str, Any] | None:
    """Returns the pictures of a matrix of this shape with nonzeros in these places. A large matrix gets no blocks and
    groups."""
    if not (shape[0] and shape[1]):
        return None
    r, c = rows.cpu().numpy(), columns.cpu().numpy()
    if shape[0] * shape[1] <= _MOST_ELEMENTS:
        mask = np.zeros(shape, dtype=np.bool_)
        mask[r, c] = True
        return _of_mask(mask, threads)
    height, width = (min(size, _SIDE) for size in shape)
    cells = np.zeros((height, width))
    np.add.at(cells, (r * height // shape[0], c * width // shape[1]), 1.0)
    by_row, by_column = np.bincount(r, minlength=shape[0]), np.bincount(c, minlength=shape[1])
    picture = _picture(cells / (shape[0] / height * (shape[1] / width)))
    return _facts(shape, picture, by_row, by_column, threads)


def _of_mask(mask: Array, threads: int) -> dict[str, Any]:
    height, width = (min(size, _SIDE) for size in mask.shape)
    cells = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(mask).float()[None], (height, width))[0].numpy()
    bits = np.packbits(np.pad(mask, [(0, -size % BLOCKS[-1]) for size in mask.shape]), axis=1, bitorder="little")
    by_row, by_column = mask.sum(1), mask.sum(0)
    facts = _facts(mask.shape, _picture(cells), by_row, by_column, threads)
    return facts | {"fill": _fill(bits, facts["nonzeros"]), "groups": _groups(mask, facts["nonzeros"] / mask.size)}


def _facts(shape: tuple[int, ...], picture: dict[str, Any], rows: Array, columns: Array, threads: int) -> dict[str, Any]:
    return {
        "shape": list(shape),
        "nonzeros": int(rows.sum()),
        "picture": picture,
        "rows": _histogram(rows),
        "columns": _histogram(columns),
        "fill": None,
        "groups": [],
        "shares": _shares(rows, threads),
    }


def _picture(cells: Array) -> dict[str, Any]:
    """Returns the densities of the cells of a grid in base64, one byte each: 255 for a full cell, 0 only for an empty one."""
    levels = np.clip(np.round(cells * 255), 0, 255).astype(np.uint8)
    levels[(cells > 0) & (levels == 0)] = 1
    text = base64.b64encode(levels.tobytes()).decode()
    return {"height": cells.shape[0], "width": cells.shape[1], "levels": text}


def _histogram(counts: Array) -> dict[str, Any]:
    """Returns a histogram of nonzeros in a line, in bins of equal width from `low` on, with the least, mean and most."""
    low, high = int(counts.min()), int(counts.max())
    width = max(1, -(-(high - low + 1) // _BINS))
    bins = np.bincount((counts - low) // width)
    return {"low": low, "high": high, "mean": float(counts.mean()), "width": width, "bins": bins.tolist()}


def _fill(bits: Array, nonzeros: int) -> list[list[float]]:
    """Returns, for each height and width of `BLOCKS`, the density of the aligned blocks that have nonzeros.

    `bits` has one bit for each element, and is padded to whole blocks of the largest size.
    """
    table = list[list[float]]()
    for height in BLOCKS:
        if height > 1:
            bits = bits[0::2] | bits[1::2]
        by_byte = np.bincount(bits.reshape(-1), minlength=256)
        blocks = [int(by_byte @ _occupied(width)) for width in BLOCKS if width <= 8]
        flat = np.ascontiguousarray(bits)
        blocks += [int(np.count_nonzero(flat.view(kind))) for kind in (np.uint16, np.uint32, np.uint64)]
        areas = [height * width for width in BLOCKS]
        table.append([round(nonzeros / (n * area), 4) if n else 0.0 for n, area in zip(blocks, areas, strict=True)])
    return table


@cache
def _occupied(width: int) -> Array:
    """Returns, for each byte, how many of its parts of `width` bits are not zero."""
    parts = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).reshape(256, -1, width)
    return parts.any(2).sum(1)


def _groups(mask: Array, density: float) -> list[dict[str, Any]]:
    """Returns, for each n:m, the share of groups along rows with at most n nonzeros, and the share that chance would give."""
    found = list[dict[str, Any]]()
    for size in sorted({m for _, m in _GROUPS}):
        whole = mask[:, : mask.shape[1] // size * size]
        if not whole.size:
            continue
        counts = np.bincount(
            np.add.reduceat(whole.reshape(-1).view(np.uint8), np.arange(0, whole.size, size)), minlength=size + 1
        )
        for n in (n for n, m in _GROUPS if m == size):
            chance = sum(comb(size, k) * density**k * (1 - density) ** (size - k) for k in range(n + 1))
            held = float(counts[: n + 1].sum() / counts.sum())
            by_chance = (1 - chance) * counts.sum() < _CHANCE
            verdict = ("by chance" if by_chance else "found") if held == 1 else ""
            if not verdict and chance < _NEARLY <= held and held - chance > (1 - chance) / 2:
                verdict = "nearly"
            found.append({"n": n, "m": size, "held": held, "chance": chance, "verdict": verdict})
    return found


def _shares(rows: Array, threads: int) -> dict[str, Any]:
    """Returns the nonzeros of each thread, if all get equally many rows, and if all get about equally many nonzeros."""
    total, count = rows.cumsum(), max(1, min(threads, rows.size))
    ends = np.searchsorted(total, np.linspace(0, total[-1], count + 1)[1:-1])
    even, balanced = np.array_split(rows, count), np.split(rows, ends)
    return {"threads": count, "rows": [int(p.sum()) for p in even], "nonzeros": [int(p.sum()) for p in balanced]}
