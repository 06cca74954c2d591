"""Predicts what a sparse linear layer costs beside the dense one, in microseconds.

y[t, m] = sum_k x[t, k] w[m, k], T tokens:

    dense    Machine.speeds        measured products, by element type, bytes of the weight and T
    sparse   Family.cycles         each family of schedules has its own terms, in cycles of a core of 3 GHz;
             Speed.cycles_a_us     a calibration finds how many of them pass here, by family, T and density
             at least              the weight is read (Family.read, Machine.read), and multiplied 1.25 times as fast as in the
                                   best dense product
    each     Machine.call_us       the call
             _MEET_US              threads that share a call have to meet; one computes alone what takes less
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
"""Microseconds to make a float of an integer of a group, which dense products do at every call."""
_MEMORY = 24.0
"""Gigabytes a second that a core reads from memory, where the weights of a decoder lie that are in groups: one layer comes
after the other, and no cache holds them all."""
UNKNOWN_TOKENS = 32  # assumed where the number of tokens is not known at compile time


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
        """The prediction corrected by factors found in a measurement, of the schedules that have one."""
        able = [(name, us * by_schedule[name]) for name, us in self.by_schedule if name in by_schedule]
        return Prediction(self.dense_us * dense, tuple(sorted(able, key=lambda item: item[1])))

    @property
    def gain(self) -> float:
        """How many times faster sparse is."""
        return self.dense_us / self.sparse_us


@dataclass(frozen=True)
class Terms:
    """What the prediction for a schedule is made of, for one core: the largest of three times, shared out, and the call.

    multiply_us  the schedule's own cycles
    read_us      the weight is read: `read_bytes` at `read_gbs` gigabytes a second
    least_us     multiplied 1.25 times as fast as in the best dense product, `peak_gflops`
    call_us      the call
    threads      how many share all but the call
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
    """Microseconds of the dense product on one core. Where f32 may be rounded to bf16, torch does so on AMX alone."""
    element = matrix.element if matrix.given is None or "amx" in matrix.features else matrix.given
    elements = matrix.rows * matrix.columns
    floats = 0.0 if matrix.groups is None else _FLOAT_US * elements
    return machine.speeds[element].dense_us(elements, WEIGHTS[element].bytes, tokens) + floats


def _shared(us: float, threads: int) -> float:
    """What takes one thread so many microseconds, on several if that is faster."""
    return min(us, us / threads + _MEET_US)


def predict(matrix: Matrix, tokens: int | None, threads: int = 1, machine: Machine | None = None) -> Prediction:
    """The cost of a layer with this weight, by default on the usual machine. Threads share all but the call, and meet."""
    machine = machine or Machine.usual(matrix.bits)
    t = UNKNOWN_TOKENS if tokens is None else max(tokens, 1)
    dense = _dense_us(matrix, t, machine) / threads
    possible = [f for f in FAMILIES.values() if t <= f.most and f.stores(matrix) is not None]
    sparse = sorted((us, f.name) for f in possible if (us := terms(f, matrix, t, threads, machine).us) < math.inf)
    return Prediction(dense, tuple((name, us) for us, name in sparse))


def terms(family: Family, matrix: Matrix, tokens: int, threads: int, machine: Machine) -> Terms:
    """What the prediction for a product by one family is made of."""
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
