"""Formats names, numbers and bytes for the tables of reports."""

import re
from collections.abc import Callable
from itertools import groupby

_NUMBER = re.compile(r"(?<![^. ])(?<!of )\d+(?![^. ,])")
_TIME = re.compile(r"(\w+) (\d[\d.]*) us")
_TIMES = re.compile(rf"{_TIME.pattern}(, {_TIME.pattern})*")


def without_numbers(name: str) -> str:
    """Replaces the numbers in a name, so that equal layers of a stack have equal names: layer.0.fc → layer.*.fc."""
    return _NUMBER.sub("*", name)


def one_name(names: list[str]) -> str:
    """Returns one name for names that differ only in numbers: layer.0.fc, layer.1.fc, layer.2.fc → layer.{0-2}.fc."""
    numbers = [list(dict.fromkeys(found)) for found in zip(*map(_NUMBER.findall, names), strict=True)]
    texts = iter(column[0] if len(column) == 1 else f"{{{_runs(column)}}}" for column in numbers)
    return _NUMBER.sub(lambda _: next(texts), names[0])


def without_times(reason: str) -> tuple[str, tuple[frozenset[str], ...]]:
    """Returns a reason without its times, and the names of what was timed at each place. Reasons of a kind have equal ones."""
    return _TIMES.sub("*", reason), tuple(frozenset(times) for times in _times(reason))


def one_reason(reasons: list[str]) -> str:
    """Returns one reason for reasons that differ only in times: a 90 us, dense 200 us → a 90-95 us, dense 200 us."""
    places = zip(*map(_times, reasons), strict=True)
    texts = (", ".join(f"{name} {_ends([times[name] for times in place])} us" for name in place[0]) for place in places)
    return _TIMES.sub(lambda _: next(texts), reasons[0])


def _times(reason: str) -> list[dict[str, str]]:
    """Returns the times by their names, for each place of a reason that has some."""
    return [dict(_TIME.findall(place.group())) for place in _TIMES.finditer(reason)]


def _ends(numbers: list[str]) -> str:
    low, high = min(numbers, key=float), max(numbers, key=float)
    return low if low == high else f"{low}-{high}"


def _runs(numbers: list[str]) -> str:
    runs = []
    for _, run in groupby(enumerate(sorted(numbers, key=int)), lambda pair: int(pair[1]) - pair[0]):
        texts = [text for _, text in run]
        runs.append(texts[0] if len(texts) == 1 else f"{texts[0]}-{texts[-1]}")
    return ",".join(runs)


def times(factor: float) -> str:
    """Returns a factor as text with two digits or, from 100 on, all digits before the point: 0.25, 3.1, 480."""
    return f"{factor:.2g}" if factor < 99.5 else f"{factor:.0f}"


def span(values: list[float], form: Callable[[float], str], unit: str) -> str:
    """Returns the range of some values as text, or one value if both ends are equal. `form` writes a value."""
    if not values:
        return "-"
    low, high = form(min(values)), form(max(values))
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"


def in_bytes(number: int) -> str:
    """Returns a number of bytes as text, in kB or MB. Only 0 bytes are 0 kB."""
    least = min(1, number)
    return f"{number / 1e6:.{1 if number < 1e7 else 0}f} MB" if number >= 1e5 else f"{max(least, round(number / 1e3))} kB"


def in_percent(share: float) -> str:
    """Returns a share without its unit, %. Shares below 1 % have a digit that is not 0 after the point, as of graphs' edges."""
    if not 0 < share < 0.01:
        return f"{100 * share:.0f}"
    return f"{100 * share:.1f}" if share >= 0.0005 else f"{100 * share:.1g}"


def count(number: int, noun: str) -> str:
    """Returns a number with a noun, which gets an s unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
