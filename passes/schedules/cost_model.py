"""Predicts the time of a sparse linear layer, with each schedule, and of the dense one, in microseconds.

y[t, m] = sum_k x[t, k] w[m, k], T tokens:

    dense    Machine.speeds        measured products, by element type, bytes of the weight and T
    sparse   Family.cycles         each family of schedules has its own terms, in cycles of a core of 3 GHz
             Speed.cycles_a_us     how many of these cycles pass in a microsecond on this machine: a calibration measures it,
                                   by family, T and density
             lower bounds          the time to read the weight (Family.read, Machine.read), and the time to multiply the
                                   nonzeros 1.25 times as fast as the best dense product
    each     Machine.call_us       the call itself
             _MEET_US              the time in which threads that share a call synchronise. One thread computes alone what
                                   takes less.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.dialects.elements import WEIGHTS
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.schedules.families import FAMILIES
from gossamer.passes.schedules.machine_speed import Machine

_FASTER = 0.8
_MEET_US = 2.0
_FLOAT_US = 1e-3
"""Microseconds to turn an integer of a quantized group into a float. Dense products do so at every call."""
_MEMORY = 24.0
"""Gigabytes a second that a core reads from memory. Weights quantized in groups are those of decoders: their layers run one
after the other, and no cache holds all of them."""
UNKNOWN_TOKENS = 32  # assumed if the number of tokens is not known at compile time


@dataclass(frozen=True)
class Prediction:
    """Predicted microseconds of a call, dense and with each schedule, the fastest first."""

    dense_us: float
    by_schedule: tuple[tuple[str, float], ...]

    @property
    def schedule(self) -> str:
        """The fastest schedule."""
        return self.by_schedule[0][0]

    @property
    def sparse_us(self) -> float:
        """Microseconds of the fastest schedule."""
        return self.by_schedule[0][1]

    def scaled(self, dense: float, by_schedule: Mapping[str, float]) -> "Prediction":
        """Returns the prediction times factors from a measurement. Schedules without a factor are left out."""
        able = [(name, us * by_schedule[name]) for name, us in self.by_schedule if name in by_schedule]
        return Prediction(self.dense_us * dense, tuple(sorted(able, key=lambda item: item[1])))

    @property
    def gain(self) -> float:
        """How many times faster sparse is."""
        return self.dense_us / self.sparse_us


@dataclass(frozen=True)
class Terms:
    """The terms of the prediction for a schedule. The largest of three times of one core is divided among threads; then comes
    the call.

    multiply_us  time of the schedule's own cycles
    read_us      time to read the weight: `read_bytes` at `read_gbs` gigabytes a second
    least_us     time to multiply the nonzeros 1.25 times as fast as the best dense product, which has `peak_gflops`
    call_us      time of the call itself
    threads      number of threads that share everything but the call
    """

    multiply_us: float
    read_us: float
    least_us: float
    call_us: float
    read_bytes: float
    read_gbs: float
    peak_gflops: float
    threads: int

    @property
    def us(self) -> float:
        """The prediction, in microseconds."""
        return _shared(max(self.multiply_us, self.read_us, self.least_us), self.threads) + self.call_us


def _dense_us(matrix: Matrix, tokens: int, machine: Machine) -> float:
    """Returns microseconds of the dense product on one core. If f32 may be rounded to bf16, torch does so only with AMX."""
    element = matrix.element if matrix.given is None or "amx" in matrix.features else matrix.given
    elements = matrix.rows * matrix.columns
    floats = 0.0 if matrix.groups is None else _FLOAT_US * elements
    return machine.speeds[element].dense_us(elements, WEIGHTS[element].bytes, tokens) + floats


def _shared(us: float, threads: int) -> float:
    """Returns the microseconds of work that takes one thread `us`: on several threads, or on one if that is faster."""
    return min(us, us / threads + _MEET_US)


def predict(matrix: Matrix, tokens: int | None, threads: int = 1, machine: Machine | None = None) -> Prediction:
    """Predicts a layer with this weight, by default on the usual machine. Threads share everything but the call."""
    machine = machine or Machine.usual(matrix.bits)
    t = UNKNOWN_TOKENS if tokens is None else max(tokens, 1)
    dense = _dense_us(matrix, t, machine) / threads
    possible = [f for f in FAMILIES.values() if t <= f.most and f.stores(matrix) is not None]
    sparse = sorted((us, f.name) for f in possible if (us := terms(f, matrix, t, threads, machine).us) < math.inf)
    return Prediction(dense, tuple((name, us) for us, name in sparse))


def terms(family: Family, matrix: Matrix, tokens: int, threads: int, machine: Machine) -> Terms:
    """Returns the terms of the prediction for a product by one family."""
    speed, width = machine.speeds[matrix.element], WEIGHTS[matrix.element].bytes
    fastest = min(machine.speeds[element].least for element in {matrix.element, "f64" if width == 8 else "f32"})
    read, cycles = family.read(matrix), family.cycles(matrix, tokens)
    rate = machine.read.at(read) if matrix.groups is None else min(machine.read.at(read), _MEMORY)
    return Terms(
        cycles / speed.cycles_a_us(family.name, tokens, matrix.density),
        read / rate / 1e3,
        _FASTER * fastest * matrix.nonzeros * tokens * 1e-6,
        machine.call_us,
        read,
        rate,
        2e3 / fastest,
        threads,
    )
