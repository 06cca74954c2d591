"""Random numbers that depend only on a counter and a key, so that backward can draw those of forward again, in any order.

Philox2x32-7 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Seven rounds are the fewest that pass
their tests (BigCrush). Both kernels and torch's operations compute these rounds, each with its own arithmetic.
"""

from collections.abc import Callable
from typing import TypeVar

_ROUNDS = 7
MULTIPLIER = 0xD256D193
_WEYL = 0x9E3779B9

Word = TypeVar("Word")


def philox(
    left: Word,
    right: Word,
    multiplied: Callable[[Word], tuple[Word, Word]],
    keyed: Callable[[int], Word],
    xor: Callable[[Word, Word], Word],
) -> Word:
    """Returns 32 random bits for the two words of a counter.

    multiplied  multiplies a word by `MULTIPLIER`; returns the upper and the lower word of the product
    keyed       returns the key plus a number
    xor         returns the exclusive or of two words
    """
    for number in range(_ROUNDS):
        high, low = multiplied(left)
        left, right = xor(xor(high, keyed(number * _WEYL)), right), low
    return left


def threshold(share: float) -> int:
    """Returns the lowest word of random bits that, as a number in [0, 1), is at least `share`."""
    return min(round(share * 2**32), 2**32 - 1)
