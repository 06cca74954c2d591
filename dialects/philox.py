"""Random numbers that depend on a counter and a key only, so that backward draws those of forward again, in any order.

Philox2x32-7 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011: seven rounds are the fewest that pass
their tests (BigCrush). The rounds are here, for whatever computes them: kernels, and torch's operations.
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
    """32 random bits of the two words of a counter.

    multiplied  a word times `MULTIPLIER`: the upper word of the product, and the lower one
    keyed       the key + a number
    """
    for number in range(_ROUNDS):
        high, low = multiplied(left)
        left, right = xor(xor(high, keyed(number * _WEYL)), right), low
    return left


def threshold(share: float) -> int:
    """The word from which on random bits, as numbers in [0, 1), are `share` or more."""
    return min(round(share * 2**32), 2**32 - 1)
