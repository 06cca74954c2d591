"""Orders the rows of a matrix into strips, for packings whose strips take as many steps as the fullest of their rows."""

import numpy as np
import torch

_CHOICE = 256  # rows that a strip chooses from; more take longer, and gain nothing


def alike(needed: torch.Tensor, height: int) -> torch.Tensor:
    """Returns an order of the rows [M] in which consecutive `height` rows, a strip, need similar numbers of steps.

    `needed`, [M, pieces], has the steps of each row in each piece of columns. In each piece, a strip takes the steps of its
    fullest row. A strip begins with the fullest row left. Then the row that adds the fewest steps joins it, and so on.
    """
    steps = needed.numpy().astype(np.int32)
    total = steps.sum(1)
    left, order = np.argsort(-total, kind="stable"), list[np.ndarray]()
    while len(left):
        choice, strip = steps[left[:_CHOICE]], steps[left[0]].copy()
        # Between rows that add as many steps, take the fuller one.
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
