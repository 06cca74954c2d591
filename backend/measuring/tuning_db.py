"""The tuning database: measured times of products, by the features of the weight's pattern.

It is a journal beside the kernel cache, one for each CPU and set of versions. A line is a key and its times:

    {"key": {"rows": 768, "columns": 3072, ..., "tokens": 128, "threads": 1}, "us": {"dense": 6369, "broadcast": 1204}}

Equal keys share times. A similar key may use them, scaled by the predictions of both. It is similar if it has the same
structure and tokens, and about the same density and sizes. Predictions must also put the contenders into the same order.

A line also says whether other processes slowed the machine down ("disturbed", "beside"). Of disturbed times the least count.
Such a key is measured again, three times in all. After that it is measured again only while nobody disturbs, until undisturbed
times exist.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from gossamer.backend.devices.identity import identity
from gossamer.backend.devices.measured_times import DENSE, Times
from gossamer.backend.measuring.kept import TRIES, may_try_again, was_disturbed
from gossamer.dialects.elements import FLOATS
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.families import FAMILIES
from gossamer.runtime import records
from gossamer.runtime.data_cache import first_level_bytes
from gossamer.runtime.target import host

_FIELDS = ("rows", "columns", "reduction", "element", "density", "block", "fill", "nm", "skew", "given", "vnm")
_SAME = ("reduction", "element", "block", "nm", "given")
_NEAR_SIZE, _NEAR_DENSITY = 2.0, 1.6  # factors up to which sizes and densities are similar
_CLEAR = 1.15  # factor by which the fastest has to win before a similar key uses its times
_LONGEST_US = 1e9  # longer times in a journal are not believed


def _count(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 48


def _sizes(number: int) -> Callable[[Any], bool]:
    return lambda value: value is None or (isinstance(value, tuple) and len(value) == number and all(map(_count, value)))


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


_POSSIBLE: dict[str, Callable[[Any], bool]] = {
    "rows": _count, "columns": _count, "tokens": _count, "threads": _count,
    "reduction": [0, 1].__contains__,
    "element": [*FLOATS].__contains__, "given": [None, *FLOATS].__contains__,
    "density": _between(1e-12, 1), "fill": _between(0.01, 1), "skew": _between(1, 1e12),
    "block": _sizes(2), "nm": _sizes(2), "vnm": _sizes(3),
}  # fmt: skip
"""Checks of the fields of a key from disk. A journal may be damaged, and predictions divide by some of the fields."""


@dataclass(frozen=True)
class Key:
    """A product: its weight (with a rounded pattern), the class of its number of tokens, and the number of threads."""

    matrix: Matrix
    tokens: int
    threads: int

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, without those that follow from the machine."""
        return {name: getattr(self.matrix, name) for name in _FIELDS} | {"tokens": self.tokens, "threads": self.threads}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Returns the key that `to_json` wrote on this machine. Raises ValueError, KeyError or TypeError if `found` is none."""
        values: dict[str, Any] = {name: found[name] for name in _POSSIBLE}
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        wrong = [name for name, possible in _POSSIBLE.items() if not possible(values[name])]
        if wrong:
            raise ValueError(f"{wrong[0]} is {values[wrong[0]]!r}")
        tokens, threads = values.pop("tokens"), values.pop("threads")
        matrix = Matrix(bits=host().vector_bits, features=host().instructions, l1d=first_level_bytes(), **values)
        return cls(matrix, tokens, threads)


Predict = Callable[[Key], Mapping[str, float]]


class TuningDatabase:
    """The journal of this machine as it was when opened, and the times that this process added."""

    def __init__(self) -> None:
        self._name = f"tuning-{identity()}"
        self._entries: dict[Key, Times] = {}
        self._tries: dict[Key, int] = {}
        for line in records.lines(self._name):
            try:
                key, us = Key.from_json(line["key"]), {str(name): float(value) for name, value in line["us"].items()}
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                continue  # damaged, or of another version
            if {DENSE} < us.keys() <= {DENSE, *FAMILIES} and all(0 < value < _LONGEST_US for value in us.values()):
                self._enter(key, us, was_disturbed(line))

    def find(self, key: Key) -> Times | None:
        """Returns the times that were measured for a key; None if there are none."""
        times = self._entries.get(key)
        if times is not None:
            records.used(self._name, _line(key, times))
        return times

    def is_settled(self, key: Key) -> bool:
        """Whether a key need not be measured again."""
        tries = self._tries.get(key, 0)
        return key in self._entries and (tries == 0 or (tries >= TRIES and not may_try_again(tries)))

    def similar(self, key: Key, predict: Predict) -> Times | None:
        """Returns the times of the most similar key, scaled by predictions; None if there is none.

        `predict` returns predicted microseconds by schedule and DENSE. Both keys must have the same order of contenders by
        prediction. The fastest contender must win clearly, before and after scaling.
        """
        own = predict(key)
        near = [(distance, other) for other in self._entries if (distance := _distance(key, other)) is not None]
        for _, other in sorted(near, key=lambda pair: pair[0]):
            times, predicted = self._entries[other].us, predict(other)
            known = [name for name in times if name in predicted and name in own]
            if not self._entries[other].are_believable(predicted):
                continue
            if len(known) < len(times) or sorted(known, key=own.__getitem__) != sorted(known, key=predicted.__getitem__):
                continue
            scaled = {name: times[name] * own[name] / predicted[name] for name in known}
            if Times(times).fastest == Times(scaled).fastest and _clear(times) and _clear(scaled):
                records.used(self._name, _line(other, self._entries[other]))
                return Times(scaled, None if _in_words(other) == _in_words(key) else _in_words(other))
        return None

    def add(self, key: Key, times: Times, told: Mapping[str, Any] = MappingProxyType({})) -> Times:
        """Keeps the times of a key, here and on disk, and returns the times that now count. `told` is from `kept.told`."""
        records.append(self._name, _line(key, times) | dict(told))
        return self._enter(key, times.us, was_disturbed(told))

    def _enter(self, key: Key, us: Mapping[str, float], disturbed: bool) -> Times:
        tries, before = self._tries.get(key, 0), self._entries.get(key)
        if disturbed and tries and before is not None:
            us = {**before.us, **{name: min(value, before.us.get(name, value)) for name, value in us.items()}}
        if not disturbed or tries or before is None:  # disturbed times do not replace undisturbed ones
            self._entries[key], self._tries[key] = Times(us), tries + 1 if disturbed else 0
        return self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)


def _line(key: Key, times: Times) -> dict[str, Any]:
    return {"key": key.to_json(), "us": dict(times.us)}


def _distance(a: Key, b: Key) -> float | None:
    """Returns the distance between two keys; None if they are not similar."""
    one, other = a.matrix, b.matrix
    if (a.tokens, a.threads) != (b.tokens, b.threads) or any(getattr(one, f) != getattr(other, f) for f in _SAME):
        return None
    ratios = {
        "rows": (one.rows / other.rows, _NEAR_SIZE),
        "columns": (one.columns / other.columns, _NEAR_SIZE),
        "density": (one.density / other.density, _NEAR_DENSITY),
    }
    if any(not 1 / limit <= ratio <= limit for ratio, limit in ratios.values()):
        return None
    return sum(abs(math.log(ratio)) for ratio, _ in ratios.values())


def _clear(us: Mapping[str, float]) -> bool:
    first, *rest = sorted(us.values())
    return not rest or rest[0] >= _CLEAR * first


def _in_words(key: Key) -> str:
    return f"{key.matrix.rows}x{key.matrix.columns} at {key.matrix.density:.0%}"
