"""Which rows of a matrix make a strip, where strips take as many steps as the fullest of their rows."""

import numpy as np
import torch

_CHOICE = 256  # rows that a strip chooses from: with more of them it takes longer, and gains nothing


def alike(needed: torch.Tensor, height: int) -> torch.Tensor:
    """The rows [M] in an order in which each `height` of them, a strip, need like numbers of steps.

    `needed` has the steps of each row in each of the pieces that rows are cut into, [M, pieces]; a strip takes in each piece
    what the fullest of its rows needs. From the fullest row on, that row is added which makes the strip take fewest more.
    """
    steps = needed.numpy().astype(np.int32)
    total = steps.sum(1)
    left, order = np.argsort(-total, kind="stable"), list[np.ndarray]()
    while len(left):
        choice, strip = steps[left[:_CHOICE]], steps[left[0]].copy()
        # Of rows that make it take as many, the fuller one.
        cost = -total[left[:_CHOICE]] / (1 + total[left[0]])
        taken = [0]
        cost[0] = np.inf
        for _ in range(min(height, len(left)) - 1):
            best = int(np.argmin(np.maximum(choice, strip).sum(1) + cost))
            cost[best] = np.inf
            np.maximum(strip, choice[best], out=strip)
            taken.append(best)
        order.append(left[taken])
        left = np.delete(left, taken)
    return torch.from_numpy(np.concatenate(order)) if order else torch.arange(0)
