"""Makes the arrays of the packing `ByteWindows`: which nonzeros go into each line, and which window of columns each line reads.

All strips are cut into lines at once. Where a row has fewer nonzeros than others, its next nonzeros may run ahead, within the
window. So a strip takes a fifth fewer lines than if it finished each window before the next one.
"""

import numpy as np
import torch

from gossamer.dialects.packing import ByteWindows
from gossamer.runtime.packers.row_order import alike

_NONE = np.iinfo(np.int32).max  # past the last nonzero of a row


def fill(
    packing: ByteWindows, nonzero: torch.Tensor, places: torch.Tensor, nowhere: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns positions, windows, order and places of a matrix [M, K], and the source of each value; arguments as in
    `fill.Rows`.

    Tries two orders of the rows, and takes the one whose strips have fewer lines.
    """
    m, r, together = nonzero.shape[0], packing.rows, packing.TOGETHER
    row, column = (each.numpy() for each in nonzero.nonzero().unbind(1))
    counts = np.bincount(row, minlength=m + -m % r)
    rank = np.arange(len(row)) - (counts.cumsum() - counts)[row]
    columns = np.full((len(counts), counts.max(initial=0) + together), _NONE, np.int32)
    columns[row, rank] = column
    added = np.arange(m, len(counts))
    cuts = [_cut(packing, columns, np.r_[order, added], nonzero.shape[1]) for order in _orders(packing, nonzero, counts[:m])]
    order, windows, slots = min(cuts, key=lambda cut: cut[1].size - np.count_nonzero(cut[1] < 0))
    used = windows >= 0
    begins = np.r_[0, used.sum(1).cumsum()]
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    at, (line, turn) = place[row], np.divmod(slots[place[row], rank], together)
    where = ((begins[at // r] + line) * r + at % r) * together + turn
    size = int(begins[-1]) * r * together
    looked_up = np.zeros(size, np.uint8)
    looked_up[where] = column - packing.STEP * windows[at // r, line]
    source = places.new_full((size,), nowhere)
    source[torch.from_numpy(where)] = places[nonzero]
    arrays = [begins, windows[used], *([order] if packing.sorted else []), looked_up]
    return [torch.from_numpy(array) for array in arrays], source


def _orders(packing: ByteWindows, nonzero: torch.Tensor, counts: np.ndarray) -> list[np.ndarray]:
    """Returns orders of the rows to try: the given one; or, if they may be sorted, by their steps in each piece, and by
    length."""
    if not packing.sorted:
        return [np.arange(len(counts))]
    (m, k), wide = nonzero.shape, packing.COLUMNS
    filled = torch.nn.functional.pad(nonzero, (0, -k % wide)).view(m, -(-k // wide), wide)
    needed = -(-filled.sum(2) // packing.TOGETHER)
    return [alike(needed, packing.rows).numpy(), np.argsort(-counts, kind="stable")]


def _cut(packing: ByteWindows, columns: np.ndarray, order: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the order, the window of each line of each strip (-1 after its last line), and the slot of each row's nonzeros in
    the strip. A line has four slots for each row."""
    r, together, step = packing.rows, packing.TOGETHER, packing.STEP
    columns, last = columns[order], max(0, -(-(width - packing.COLUMNS) // step))
    rows, turns = np.arange(len(order))[:, None], np.arange(together)
    slots, windows = np.zeros(columns.shape, np.int32), list[np.ndarray]()
    done = np.zeros(len(order), np.int64)  # nonzeros of each row that are in a line already
    while True:
        next_ones = done[:, None] + turns
        given = columns[rows, next_ones]
        first = given[:, 0].reshape(-1, r).min(1, initial=_NONE)
        if (first == _NONE).all():
            break
        window = np.where(first == _NONE, -1, np.minimum(first // step, last))
        slots[rows, next_ones] = together * len(windows) + turns
        windows.append(window)
        end = np.repeat(step * window + packing.COLUMNS, r)
        done += (given < end[:, None]).sum(1)
    shape = (len(order) // r, len(windows))
    return order, np.stack(windows, 1) if windows else np.zeros(shape, np.int64), slots
