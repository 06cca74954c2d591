"""Predicts the microseconds of a linear layer on an NVIDIA GPU, sparse and dense, with a roofline model.

y[t, m] = sum_k x[t, k] w[m, k], with T tokens, S multiprocessors of C cycles a microsecond, B bytes a microsecond:

    dense    M K max(T, 16) / (S C R) / rates.dense    R multiply-adds a cycle of a multiprocessor (_TENSOR, _FLOAT)
    sparse   Family.cycles rates.cycles / (S C)        each GPU family has its own terms, in cycles of a multiprocessor
    at least the weight as it is stored, x and y / (B rates.read)
    each     rates.kernel_us                           the shortest kernel; sparse ones add rates.call_us, as Python calls them

A dense product of int8 takes two kernels: one writes sums, the other converts them to floats. A sparse product takes one.

Nothing here was fitted to measurements. Peaks are those of NVIDIA's architecture papers, `Rates` are usual for cuBLAS and
streaming kernels. benchmarks/gpu/fit.py finds the rates that fit measured times. Layers too small to fill the GPU take longer
than predicted, both sparse and dense.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gossamer.dialects.elements import FLOATS, WEIGHTS
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.cost_model import UNKNOWN_TOKENS, Prediction
from gossamer.passes.schedules.families import GPU_FAMILIES
from gossamer.runtime.cuda import Device

# Multiply-adds in a cycle of a multiprocessor, by the least compute capability: of f16 and bf16 with sums in f32 on tensor
# cores (TF32 has half of it, int8 twice as much), and of f32 without tensor cores.
_TENSOR = ((80, 1024), (86, 512), (90, 2048), (100, 4096), (120, 512))
_FLOAT = ((80, 64), (86, 128))
_LEAST_TOKENS = 16  # in a tile of tensor cores
_BYTES_A_CYCLE = 8  # that a multiprocessor reads from memory, if the driver does not tell the memory's speed
_SUM, _RESULT = 4, 4  # bytes of an int32 sum of int8 products, and of the float that it becomes


@dataclass(frozen=True)
class Rates:
    """How much of a GPU's peaks programs reach.

    dense      share of the peak multiply-adds that cuBLAS reaches
    read       share of the memory's speed that streaming kernels reach
    kernel_us  microseconds of the shortest kernel
    call_us    additional microseconds of a kernel that Python calls
    cycles     by schedule, measured over predicted cycles; 1 for schedules that are not in it
    """

    dense: float = 0.7
    read: float = 0.8
    kernel_us: float = 3.0
    call_us: float = 4.0
    cycles: Mapping[str, float] = field(default_factory=dict)


EXPECTED = Rates()


@dataclass(frozen=True)
class Roofline:
    """A GPU's peaks a microsecond: multiply-adds with and without tensor cores, cycles of all multiprocessors, bytes read."""

    tensor: float
    floats: float
    cycles: float
    bytes: float
    rates: Rates

    @classmethod
    def of(cls, device: Device) -> "Roofline":
        """Makes the roofline of a device from what the driver tells."""
        return cls.with_peaks(device.capability, device.multiprocessors * device.clock_mhz, device.bytes_a_us, EXPECTED)

    @classmethod
    def with_peaks(cls, capability: tuple[int, int], cycles: float, bytes_a_us: float, rates: Rates) -> "Roofline":
        """Makes a roofline from the cycles of all multiprocessors in a microsecond. `bytes_a_us` 0 means unknown."""
        number = 10 * capability[0] + capability[1]
        rate = lambda table: next(each for least, each in reversed(table) if number >= least)
        return cls(rate(_TENSOR) * cycles, rate(_FLOAT) * cycles, cycles, bytes_a_us or _BYTES_A_CYCLE * cycles, rates)

    def predict(self, matrix: Matrix, tokens: int | None, tf32: bool) -> Prediction:
        """Predicts a layer with this weight. `tf32` says whether torch multiplies f32 on tensor cores."""
        t = UNKNOWN_TOKENS if tokens is None else max(tokens, 1)
        able = [name for name, f in GPU_FAMILIES.items() if t <= f.most and f.stores(matrix) is not None]
        ordered = sorted((self.sparse_us(name, matrix, t) + self.rates.call_us, name) for name in able)
        return Prediction(self.dense_us(matrix, t, tf32), tuple((name, us) for us, name in ordered))

    def sparse_us(self, schedule: str, matrix: Matrix, tokens: int) -> float:
        """Returns the microseconds of Gossamer's kernel on the GPU."""
        family = GPU_FAMILIES[schedule]
        cycles = family.cycles(matrix, tokens) * self.rates.cycles.get(schedule, 1.0)
        read = self._read_us(family.read(matrix) + _through(matrix, tokens))
        return max(cycles / self.cycles, read) + self.rates.kernel_us

    def dense_us(self, matrix: Matrix, tokens: int, tf32: bool) -> float:
        """Returns the microseconds of torch's product on the GPU."""
        size, sums = matrix.rows * matrix.columns, 0 if matrix.element in FLOATS else matrix.rows * tokens * _SUM
        multiplied = size * max(tokens, _LEAST_TOKENS) / (self._rate(matrix.element, tf32) * self.rates.dense)
        read = self._read_us(size * WEIGHTS[matrix.element].bytes + _through(matrix, tokens) + 2 * sums)
        return max(multiplied, read) + self.rates.kernel_us * (2 if sums else 1)

    def _rate(self, element: str, tf32: bool) -> float:
        other = {"f32": self.tensor / 2 if tf32 else self.floats, "f64": self.floats / 2, "i8": 2 * self.tensor}
        return other.get(element, self.tensor)

    def _read_us(self, size: float) -> float:
        return size / (self.bytes * self.rates.read)


def _through(matrix: Matrix, tokens: int) -> int:
    """Returns the bytes of x and of the result."""
    width = WEIGHTS[matrix.element].bytes
    return tokens * (matrix.columns * width + matrix.rows * (width if matrix.element in FLOATS else _RESULT))


def uses_tf32() -> bool:
    """Whether torch multiplies f32 on tensor cores, as the user allowed."""
    return torch.get_float32_matmul_precision() != "highest"
