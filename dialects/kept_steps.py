"""The ops of the kernel dialect for steps of optimizers at the entries that a mask keeps: `kernel.step_kept`, and
`kernel.step_mapped`, whose entries come from a map (see row_maps.py).

A kernel reads, steps and writes one row of the parameter before the next one, so that memory is read and written once.
"""

from enum import IntEnum

from gossamer.dialects.kernel import KernelOp

_TAKES = "gradient: T[entries], rates: f64[numbers]"
_GIVES = "parameter: T[rows columns], mean: T[entries], square: T[entries], row: T[threads columns]"


class Rate(IntEnum):
    """The numbers in `rates`. kernel.step_kept has the formulas."""

    SIGN = 0  # factor of the gradient
    PENALTY = 1  # factor of the parameter that is added to its gradient
    MEAN = 2  # share of the gradient in the mean
    FORGET = 3  # share of the old square in the new one
    SQUARE = 4  # share of the gradient's square in the new one
    DECAY = 5  # factor of the parameter
    STEP = 6  # factor of the mean
    SCALE = 7  # factor of the root of the square
    EPSILON = 8


class StepKeptOp(KernelOp, name="step_kept"):
    """Steps Adam for the entries p = (r, c) of a matrix in CSR, in place. Other elements of the parameter stay as they are.

        g = SIGN gradient[p] + PENALTY parameter[r, c]
        mean[p] += MEAN (g - mean[p]),   square[p] = FORGET square[p] + SQUARE g^2
        parameter[r, c] = DECAY parameter[r, c] - STEP mean[p] / (SCALE sqrt(square[p]) + EPSILON)

    rates   see `Rate`
    row     scratch memory of each thread
    """

    takes = f"positions: i[rows+1], coordinates: i[entries], {_TAKES}"
    gives = _GIVES


class StepMappedOp(KernelOp, name="step_mapped"):
    """The same for entries that come from a map."""

    lowering = "lower-step-kept"
    takes = f"positions: i[rows+1], map: i[rows words], {_TAKES}"
    gives = _GIVES
