"""What a linear layer costs on an NVIDIA GPU, in microseconds, sparse beside dense: a roofline of the device's own figures.

y[t, m] = sum_k x[t, k] w[m, k], T tokens, S multiprocessors of C cycles a microsecond, B bytes a microsecond:

    dense    M K max(T, 16) / (S C R) / rates.dense    R multiply-adds a cycle of a multiprocessor (_TENSOR, _FLOAT)
    sparse   Family.cycles rates.cycles / (S C)        each GPU family has its own terms, in cycles of a multiprocessor
    at least the weight as it is stored, x and y / (B rates.read)
    each     rates.kernel_us                           the shortest kernel; a sparse one is called from Python: more

A dense product of int8 is two kernels: it writes its sums, which are read again to become floats. A sparse one is one.

Nothing of this was fitted to a measurement: peaks are those of NVIDIA's architecture papers, `Rates` what cuBLAS and streaming
kernels are known for. benchmarks/gpu/fit.py finds the rates that fit measured times. Smaller layers than fill the GPU cost
more, sparse and dense alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gossamer.dialects.elements import FLOATS, WEIGHTS
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.cost_model import UNKNOWN_TOKENS, Prediction
from gossamer.passes.schedules.families import GPU_FAMILIES
from gossamer.runtime.cuda import Device

# Multiply-adds a cycle of a multiprocessor, by the compute capability from which on: of f16 and bf16 summed in f32 on tensor
# cores (TF32 has half of it, int8 twice as much), and of f32 without them.
_TENSOR = ((80, 1024), (86, 512), (90, 2048), (100, 4096), (120, 512))
_FLOAT = ((80, 64), (86, 128))
_LEAST_TOKENS = 16  # of a tile of tensor cores
_BYTES_A_CYCLE = 8  # of a multiprocessor's share of memory, where the driver does not tell its speed
_SUM, _RESULT = 4, 4  # bytes of a sum of int8, and of what becomes of it


@dataclass(frozen=True)
class Rates:
    """What programs reach of a GPU's peaks.

    dense      share of the multiply-adds that cuBLAS reaches
    read       share of the memory's speed that streaming kernels reach
    kernel_us  microseconds of the shortest kernel
    call_us    more microseconds of a kernel that is called from Python
    cycles     by schedule: the cycles that it takes over those that it counts; 1 where it is not named
    """

    dense: float = 0.7
    read: float = 0.8
    kernel_us: float = 3.0
    call_us: float = 4.0
    cycles: Mapping[str, float] = field(default_factory=dict)


EXPECTED = Rates()


@dataclass(frozen=True)
class Roofline:
    """A GPU's peaks: multiply-adds a microsecond by element type, cycles of all multiprocessors, and bytes of its memory."""

    tensor: float
    floats: float
    cycles: float
    bytes: float
    rates: Rates

    @classmethod
    def of(cls, device: Device) -> "Roofline":
        """From what the driver says about a device."""
        return cls.with_peaks(device.capability, device.multiprocessors * device.clock_mhz, device.bytes_a_us, EXPECTED)

    @classmethod
    def with_peaks(cls, capability: tuple[int, int], cycles: float, bytes_a_us: float, rates: Rates) -> "Roofline":
        """For a compute capability, and cycles of all multiprocessors and bytes a microsecond; 0 bytes: nobody knows."""
        number = 10 * capability[0] + capability[1]
        rate = lambda table: next(each for least, each in reversed(table) if number >= least)
        return cls(rate(_TENSOR) * cycles, rate(_FLOAT) * cycles, cycles, bytes_a_us or _BYTES_A_CYCLE * cycles, rates)

    def predict(self, matrix: Matrix, tokens: int | None, tf32: bool) -> Prediction:
        """What a layer with this weight costs; `tf32` says whether torch multiplies f32 on tensor cores."""
        t = UNKNOWN_TOKENS if tokens is None else max(tokens, 1)
        able = [name for name, f in GPU_FAMILIES.items() if t <= f.most and f.stores(matrix) is not None]
        ordered = sorted((self.sparse_us(name, matrix, t) + self.rates.call_us, name) for name in able)
        return Prediction(self.dense_us(matrix, t, tf32), tuple((name, us) for us, name in ordered))

    def sparse_us(self, schedule: str, matrix: Matrix, tokens: int) -> float:
        """Microseconds of a kernel of ours on the GPU."""
        family = GPU_FAMILIES[schedule]
        cycles = family.cycles(matrix, tokens) * self.rates.cycles.get(schedule, 1.0)
        read = self._read_us(family.read(matrix) + _through(matrix, tokens))
        return max(cycles / self.cycles, read) + self.rates.kernel_us

    def dense_us(self, matrix: Matrix, tokens: int, tf32: bool) -> float:
        """Microseconds of torch's product on the GPU."""
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
    """Bytes of x and of the result."""
    width = WEIGHTS[matrix.element].bytes
    return tokens * (matrix.columns * width + matrix.rows * (width if matrix.element in FLOATS else _RESULT))


def uses_tf32() -> bool:
    """Whether torch multiplies f32 on tensor cores, as the user allowed."""
    return torch.get_float32_matmul_precision() != "highest"
