"""The ops of the kernel dialect for steps of optimizers at the entries that a mask keeps: `kernel.step_kept`, and
`kernel.step_mapped` where a map tells the entries (see row_maps.py).

A row of the parameter is read, stepped and written before the next one, so that memory is read and written once.
"""

from enum import IntEnum

from gossamer.dialects.kernel import KernelOp

_TAKES = "gradient: T[entries], rates: f64[numbers]"
_GIVES = "parameter: T[rows columns], mean: T[entries], square: T[entries], row: T[threads columns]"


class Rate(IntEnum):
    """What `rates` have."""

    SIGN = 0  # what gradients are multiplied with
    PENALTY = 1  # times the parameter, added to its gradient
    MEAN = 2  # the share of a gradient in the mean
    FORGET = 3  # the share of the squares that stays
    SQUARE = 4  # that of the square of a gradient
    DECAY = 5  # what the parameter is multiplied with
    STEP = 6  # times the mean
    SCALE = 7  # what the root of the squares is multiplied with
    EPSILON = 8


class StepKeptOp(KernelOp, name="step_kept"):
    """A step of Adam for the entries p = (r, c) of a matrix in CSR, in place; the other elements of the parameter stay.

        g = SIGN gradient[p] + PENALTY parameter[r, c]
        mean[p] += MEAN (g - mean[p]),   square[p] = FORGET square[p] + SQUARE g^2
        parameter[r, c] = DECAY parameter[r, c] - STEP mean[p] / (SCALE sqrt(square[p]) + EPSILON)

    rates   see `Rate`
    row     where each thread works
    """

    takes = f"positions: i[rows+1], coordinates: i[entries], {_TAKES}"
    gives = _GIVES


class StepMappedOp(KernelOp, name="step_mapped"):
    """The same for entries that a map tells."""

    lowering = "lower-step-kept"
    takes = f"positions: i[rows+1], map: i[rows words], {_TAKES}"
    gives = _GIVES
