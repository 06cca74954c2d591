"""Checks options that users give, numbers and names, with uniform messages."""

import difflib
from collections.abc import Iterable
from math import inf
from numbers import Real
from typing import Any

from gossamer.dialects.errors import OptionError


def check_share(name: str, value: Any, *, whole: bool = False) -> None:
    """Raises OptionError unless a value is a number above 0 and below 1. If `whole`, 1 is allowed too."""
    top = "at most 1" if whole else "below 1"
    if not is_number(value) or not (0 < value < 1 or (whole and value == 1)):
        raise OptionError(f"{name} is {value!r}, must be a number above 0 and {top}")


def check_positive(name: str, value: Any) -> None:
    """Raises OptionError unless a value is a finite number above 0."""
    if not is_number(value) or not 0 < value < inf:
        raise OptionError(f"{name} is {value!r}, must be a number above 0")


def check_least(name: str, value: Any, least: float, *, integer: bool = False) -> None:
    """Raises OptionError unless a value is a finite number, or an integer, of at least `least`."""
    if not is_number(value) or (integer and not isinstance(value, int)) or not least <= value < inf:
        raise OptionError(f"{name} is {value!r}, must be {'an integer' if integer else 'a number'} of at least {least:g}")


def check_name(what: str, name: Any, valid: Iterable[str]) -> None:
    """Raises OptionError unless a name is valid. The message proposes the closest valid name and lists all."""
    if name not in (known := list(valid)):
        raise OptionError(f"{what} {name!r} is not known{did_you_mean(name, known)}: there are {', '.join(known)}")


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """Returns a parenthesis that proposes the valid name closest to `name`, or "" if none is close."""
    close = difflib.get_close_matches(str(name), list(valid), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def is_number(value: Any) -> bool:
    """Whether a value is a real number, which True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)
