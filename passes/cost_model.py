"""Predicts what a sparse linear layer costs beside the dense one, in cycles of one core.

y[t, m] = sum_k x[t, k] w[m, k], T tokens, vectors of L lanes. All constants were fitted to medians measured on AVX-512
servers; ratios carry over better than times.

    dense    M K (T + 24 s) / 2 L       two FMAs a cycle, less efficient for few tokens (s = (T - 1) / 7 up to 1),
             at least M K bytes / b     the weight has to be read: b = 20 from the second-level caches, 10 from beyond;
                                        bf16 and f16 count as 4.7 times faster (AMX)
    sparse   Family.cycles              each family of schedules has its own terms
    each     15000                      the call
"""

from dataclasses import dataclass

from gossamer.passes.families import FAMILIES
from gossamer.passes.family import Matrix

UNKNOWN_TOKENS = 32  # assumed where the number of tokens is not known at compile time
_CALL = 15_000.0
_WIDTH = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}
_NARROW_SPEEDUP = 4.7
_CACHE = 4 << 20  # bytes of weight a thread keeps close
_CYCLES_A_MICROSECOND = 3000.0


@dataclass(frozen=True)
class Prediction:
    """Predicted microseconds of a call on a core of 3 GHz, dense and with the fastest schedule."""

    schedule: str
    dense_us: float
    sparse_us: float

    @property
    def gain(self) -> float:
        """How many times faster sparse is."""
        return self.dense_us / self.sparse_us


def predict(matrix: Matrix, tokens: int | None, threads: int = 1) -> Prediction:
    """The cost of a layer with this weight. More threads divide all but the call."""
    t = UNKNOWN_TOKENS if tokens is None else max(tokens, 1)
    dense = _dense(matrix, t, threads) / threads
    possible = [f for f in FAMILIES.values() if t <= f.most and f.storage(matrix) is not None]
    sparse, schedule = min((family.cycles(matrix, t), family.name) for family in possible)
    sparse = sparse / threads + _CALL
    return Prediction(schedule, dense / _CYCLES_A_MICROSECOND, sparse / _CYCLES_A_MICROSECOND)


def _dense(matrix: Matrix, t: int, threads: int) -> float:
    elements, width = matrix.rows * matrix.columns, _WIDTH[matrix.element]
    compute = elements * (t + 24 * min(1.0, (t - 1) / 7)) / (2 * matrix.lanes)
    if width == 2:
        compute /= _NARROW_SPEEDUP
    size = elements * width
    return max(compute, size / (20 if size <= _CACHE * threads else 10))
