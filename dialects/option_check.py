"""Numbers that users give as options: what they have to be, said in one way."""

from math import inf
from numbers import Real
from typing import Any

from gossamer.dialects.errors import OptionError


def check_share(name: str, value: Any, *, whole: bool = False) -> None:
    """OptionError unless a value is a number above 0 and below 1; 1 too if the `whole` is a share."""
    top = "at most 1" if whole else "below 1"
    if not _is_number(value) or not (0 < value < 1 or (whole and value == 1)):
        raise OptionError(f"{name} is {value!r}, must be a number above 0 and {top}")


def check_positive(name: str, value: Any) -> None:
    """OptionError unless a value is a finite number above 0."""
    if not _is_number(value) or not 0 < value < inf:
        raise OptionError(f"{name} is {value!r}, must be a number above 0")


def check_least(name: str, value: Any, least: float, *, integer: bool = False) -> None:
    """OptionError unless a value is a finite number, or an integer, of at least so much."""
    if not _is_number(value) or (integer and not isinstance(value, int)) or not least <= value < inf:
        raise OptionError(f"{name} is {value!r}, must be {'an integer' if integer else 'a number'} of at least {least:g}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
