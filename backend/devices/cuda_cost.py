"""What a linear layer costs on an NVIDIA GPU, in microseconds, sparse beside dense: a roofline of the device's own figures.

y[t, m] = sum_k x[t, k] w[m, k], T tokens, S multiprocessors of C cycles a microsecond, B bytes a microsecond:

    dense    M K max(T, 16) / (S C R) / 0.7       R multiply-adds a cycle of a multiprocessor (_TENSOR, _FLOAT)
    sparse   Family.cycles / (S C)                each GPU family has its own terms, in cycles of a multiprocessor
    at least the weight as it is stored, x and y / 0.8 B
    each     3                                    the shortest kernel; a sparse one is called from Python: 4 more

A dense product of int8 is two kernels: it writes its sums, which are read again to become floats. A sparse one is one.

Nothing of this was fitted to a measurement: rates are those of NVIDIA's architecture papers, efficiencies what cuBLAS and
streaming kernels are known for. Smaller layers than fill the GPU cost more, sparse and dense alike.
"""

from dataclasses import dataclass

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
_DENSE, _READ = 0.7, 0.8  # shares of the peaks that cuBLAS and streaming kernels reach
_LEAST_TOKENS = 16  # of a tile of tensor cores
_KERNEL_US, _CALL_US = 3.0, 4.0
_BYTES_A_CYCLE = 8  # of a multiprocessor's share of memory, where the driver does not tell its speed
_SUM, _RESULT = 4, 4  # bytes of a sum of int8, and of what becomes of it


@dataclass(frozen=True)
class Roofline:
    """A GPU's peaks: multiply-adds a microsecond by element type, cycles of all multiprocessors, and bytes of its memory."""

    tensor: float
    floats: float
    cycles: float
    bytes: float

    @classmethod
    def of(cls, device: Device) -> "Roofline":
        """From what the driver says about a device."""
        capability, cycles = 10 * device.capability[0] + device.capability[1], device.multiprocessors * device.clock_mhz
        rate = lambda table: next(each for least, each in reversed(table) if capability >= least)
        return cls(rate(_TENSOR) * cycles, rate(_FLOAT) * cycles, cycles, device.bytes_a_us or _BYTES_A_CYCLE * cycles)

    def predict(self, matrix: Matrix, tokens: int | None, tf32: bool) -> Prediction:
        """What a layer with this weight costs; `tf32` says whether torch multiplies f32 on tensor cores."""
        t, width = UNKNOWN_TOKENS if tokens is None else max(tokens, 1), WEIGHTS[matrix.element].bytes
        sums = 0 if matrix.element in FLOATS else matrix.rows * t * _SUM
        through = matrix.columns * t * width + matrix.rows * t * (width if not sums else _RESULT)
        able = [f for f in GPU_FAMILIES.values() if t <= f.most and f.stores(matrix) is not None]
        sparse = {f.name: max(f.cycles(matrix, t) / self.cycles, self._read_us(f.read(matrix) + through)) for f in able}
        multiplied = matrix.rows * matrix.columns * max(t, _LEAST_TOKENS) / (self._rate(matrix.element, tf32) * _DENSE)
        dense = max(multiplied, self._read_us(matrix.rows * matrix.columns * width + through + 2 * sums))
        ordered = sorted((us + _KERNEL_US + _CALL_US, name) for name, us in sparse.items())
        return Prediction(dense + _KERNEL_US * (2 if sums else 1), tuple((name, us) for us, name in ordered))

    def _rate(self, element: str, tf32: bool) -> float:
        other = {"f32": self.tensor / 2 if tf32 else self.floats, "f64": self.floats / 2, "i8": 2 * self.tensor}
        return other.get(element, self.tensor)

    def _read_us(self, size: float) -> float:
        return size / (self.bytes * _READ)


def uses_tf32() -> bool:
    """Whether torch multiplies f32 on tensor cores, as the user allowed."""
    return torch.get_float32_matmul_precision() != "highest"
