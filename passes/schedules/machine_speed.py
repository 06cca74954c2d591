"""Describes the speed of a machine for the cost model: its dense products, and the cycles of each family of schedules.

Both depend on the number of tokens, because few and many tokens run different code from different caches. A `Curve` has values
at some numbers of tokens and is interpolated between their logarithms. `Machine.usual` has the speeds found on servers with
AVX-512. A calibration measures the user's machine, one element type at a time.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

from gossamer.dialects.elements import FLOATS, WEIGHTS

SPARSE, HALF = 0.2, 0.5
"""Densities of the weights with which families are measured. The time lost between nonzeros differs from family to family."""
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
_CYCLES_A_US = 3000.0
_CALL_US = 5.0
_LEAST, _MOST = 1e-9, 1e15  # the range of plausible numbers in a calibration
_NEAR, _FAR = 1 << 20, 1 << 24  # bytes of weights that are read from the second-level cache, and from beyond it


@dataclass(frozen=True)
class Curve:
    """A positive quantity as a function of the number of tokens (or bytes). Points ascend."""

    points: tuple[tuple[int, float], ...]

    def at(self, tokens: float) -> float:
        """Returns the quantity, interpolated linearly between logarithms. Beyond the ends it is that of the end."""
        place = bisect_left(self.points, tokens, key=lambda point: point[0])
        if place == 0 or place == len(self.points):
            return self.points[min(place, len(self.points) - 1)][1]
        (t0, low), (t1, high) = self.points[place - 1 : place + 1]
        return _between(math.log(t0), low, math.log(t1), high, math.log(tokens))

    def times(self, tokens: int, factor: float) -> "Curve":
        """Returns the curve with `factor` times the quantity at a number of tokens. Other points stay."""
        return Curve(tuple(sorted({**dict(self.points), tokens: factor * self.at(tokens)}.items())))


# Predicted cycles that pass in a microsecond on Zen 4, for families whose terms were fitted to another CPU. Zen 4 has 3.6 GHz.
# In a cycle it begins one load of 512 bits (also a broadcast) instead of two, and one multiply-add, and reads 32 bytes from the
# second-level cache.
_ZEN4 = {
    "lookup": Curve(((1, 3400.0), (2, 3000.0), (8, 3150.0))),
    "broadcast": Curve(((1, 2800.0), (16, 2800.0), (32, 2700.0))),
    "block": Curve(((1, 2800.0), (32, 2550.0))),
    "blockvec": Curve(((1, 2200.0), (2, 2600.0))),
    "rowpairs": Curve(((1, 2550.0),)),
}


@dataclass(frozen=True)
class Speed:
    """How fast a machine is with one element type.

    dense     by the bytes of the weight: nanoseconds a token for each 1000 elements of the weight
    families  by the name of the family, for weights of density `SPARSE`: predicted cycles that pass in a microsecond;
              3000 for a family that was not measured
    half      the same for weights of density `HALF`, if that was measured
    """

    dense: tuple[tuple[int, Curve], ...]
    families: Mapping[str, Curve]
    half: Mapping[str, Curve] = field(default_factory=dict)

    def dense_us(self, elements: float, width: int, tokens: int) -> float:
        """Returns microseconds of a dense product with a weight of `elements` elements of `width` bytes."""
        size, sizes = elements * width, [size for size, _ in self.dense]
        place = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        (low, near), (high, far) = self.dense[max(place - 1, 0)], self.dense[place]
        near_at, far_at = near.at(tokens), far.at(tokens)
        within = min(max(size, low), high)
        each = near_at if low == high else _between(math.log(low), near_at, math.log(high), far_at, math.log(within))
        return each * elements * tokens * 1e-6

    def nearest(self, size: float) -> int:
        """Returns the nearest size of a weight, in bytes, for which dense products were measured."""
        return min((known for known, _ in self.dense), key=lambda known: abs(math.log(known / size)))

    def dense_slower(self, size: int, tokens: int, factor: float) -> "Speed":
        """Returns the speed with dense products `factor` times slower for a weight of this size, which is one of `dense`."""
        curves = ((known, curve.times(tokens, factor) if known == size else curve) for known, curve in self.dense)
        return replace(self, dense=tuple(curves))

    def slower(self, family: str, tokens: int, factor: float) -> "Speed":
        """Returns the speed with the kernels of a family `factor` times slower for a number of tokens."""
        curve = self.families.get(family, Curve(((tokens, _CYCLES_A_US),)))
        half = {family: self.half[family].times(tokens, 1 / factor)} if family in self.half else {}
        return replace(self, families={**self.families, family: curve.times(tokens, 1 / factor)}, half={**self.half, **half})

    @property
    def least(self) -> float:
        """The fewest nanoseconds a token for 1000 elements of the weight in a dense product."""
        return min(ns for _, curve in self.dense for _, ns in curve.points)

    def cycles_a_us(self, family: str, tokens: int, density: float = SPARSE) -> float:
        """Returns the predicted cycles of a family that pass in a microsecond, for a weight of this density."""
        curve, half = self.families.get(family), self.half.get(family)
        if curve is None:
            return _CYCLES_A_US
        rate = curve.at(tokens)
        if half is None:
            return rate
        within = min(max(density, SPARSE), HALF)
        return _between(math.log(SPARSE), rate, math.log(HALF), half.at(tokens), math.log(within))


@dataclass(frozen=True, eq=False)
class Machine:
    """A machine.

    name      its name in reports
    speeds    its speeds by element type
    read      gigabytes a second that one core reads, by the bytes of the data
    call_us   microseconds of a call
    measured  the element types whose speeds were measured
    """

    name: str
    speeds: Mapping[str, Speed]
    read: Curve
    call_us: float = _CALL_US
    measured: frozenset[str] = frozenset()

    @staticmethod
    @cache
    def usual(bits: int, fmas: int = 2, bf16: float = 4.7, f16: float = 4.7, i8: float = 4.0) -> "Machine":
        """Returns a server of 3 GHz with vectors of `bits` bits, fitted to medians of servers. Ratios fit better than times.

        fmas       multiply-adds of whole vectors a cycle: 2, but 1 on Zen 4 with vectors of 512 bits
        bf16, f16  dense products of these are so many times faster than in f32: 4.7 with AMX
        i8         the same for dense products of int8

            dense    M K (T / fmas + 12 s) / L cycles    on L lanes. s is the loss at few tokens: (T - 1) / 7 up to 1,
                                                         at least 0.6 for int8, and on Zen 4 for bf16.
                     at least M K bytes / b              to read the weight: b = 20 from near caches, 10 (on Zen 4
                                                         16) from beyond. Zen 4 reads it for each of up to 3 tokens.
            sparse   cycles as predicted                 except for families found to be slower on Zen 4
        """
        narrow = {"bf16": bf16, "f16": f16, "i8": i8}
        speeds = {
            element: Speed(
                tuple(
                    (size, Curve(tuple((t, _usual(t, width, bits, fmas, read, narrow.get(element, 1.0))) for t in _TOKENS)))
                    for size, read in ((_NEAR, 20.0), (4 * _NEAR, 20.0), (_FAR, 10.0 if fmas == 2 else 16.0))
                ),
                {} if fmas == 2 else _ZEN4,
            )
            for element, width in ((name, each.bytes) for name, each in WEIGHTS.items())
        }
        read = Curve(((4 * _NEAR, 60.0), (_FAR, 30.0)) if fmas == 2 else ((_FAR, 90.0), (2 * _FAR, 50.0)))
        return Machine(f"a usual server with vectors of {bits} bits", speeds, read)

    def with_speed(self, element: str, speed: Speed) -> "Machine":
        """Returns the machine with the measured speed of an element type."""
        return replace(self, speeds={**self.speeds, element: speed}, measured=self.measured | {element})

    def to_json(self) -> dict[str, Any]:
        """Returns the measured speeds as data for JSON."""
        speeds = {
            element: {
                "dense": [[size, curve.points] for size, curve in self.speeds[element].dense],
                "families": {name: curve.points for name, curve in self.speeds[element].families.items()},
                "half": {name: curve.points for name, curve in self.speeds[element].half.items()},
            }
            for element in sorted(self.measured)
        }
        return {"name": self.name, "read": self.read.points, "call_us": self.call_us, "speeds": speeds}

    def updated(self, found: Mapping[str, Any]) -> "Machine":
        """Returns the machine with the speeds that `to_json` gave. ValueError for other data or implausible numbers."""
        try:
            machine = Machine(str(found["name"]), self.speeds, _curve(found["read"]), _plausible(found["call_us"]))
            for element, speed in found["speeds"].items():
                sizes = _ascending([size for size, _ in speed["dense"]])
                dense = tuple((size, _curve(points)) for size, (_, points) in zip(sizes, speed["dense"], strict=True))
                families, half = (
                    {str(name): _curve(points) for name, points in speed[kind].items()} for kind in ("families", "half")
                )
                if element not in WEIGHTS or (element in FLOATS and not (families and half)):  # only some targets multiply int8
                    raise ValueError(f"there are no times of {element!r}")
                machine = machine.with_speed(element, Speed(dense, families, half))
            if not machine.measured:
                raise ValueError("there are no times")
        except (KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"{type(problem).__name__}: {problem}") from problem
        return machine


def _usual(tokens: int, width: int, bits: int, fmas: int, read: float, faster: float) -> float:
    """Returns nanoseconds a token for 1000 elements of the weight on the usual server."""
    lanes = bits // (64 if width == 8 else 32)
    least = 0.6 if (fmas == 1 and faster > 1) or width == 1 else 0.0
    compute = (tokens / fmas + 12 * min(1.0, max(least, (tokens - 1) / 7))) / lanes / faster
    reads = 1 if fmas == 2 else min(tokens, 3)
    return max(compute, reads * width / read) / tokens / _CYCLES_A_US * 1e6


def _curve(points: Any) -> Curve:
    numbers = _ascending([number for number, _ in points])
    return Curve(tuple((number, _plausible(value)) for number, (_, value) in zip(numbers, points, strict=True)))


def _ascending(numbers: list[Any]) -> list[int]:
    """Returns the numbers of tokens or bytes of a curve. ValueError if they do not ascend."""
    whole = all(type(number) is int and 0 < number < _MOST for number in numbers)
    if not numbers or not whole or any(next_ <= number for number, next_ in pairwise(numbers)):
        raise ValueError(f"{numbers!s:.80} do not ascend")
    return numbers


def _plausible(value: Any) -> float:
    """Returns a speed or a time, in any of the units above. ValueError if it is implausible."""
    if type(value) not in (int, float) or not _LEAST < value < _MOST:
        raise ValueError(f"{value!r:.80} is no speed")
    return float(value)


def _between(x0: float, low: float, x1: float, high: float, x: float) -> float:
    share = (x - x0) / (x1 - x0)
    return math.exp((1 - share) * math.log(low) + share * math.log(high))
