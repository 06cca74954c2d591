"""Predicts what a sparse linear layer costs beside the dense one, in cycles of one core.

y[t, m] = sum_k x[t, k] w[m, k], T tokens, vectors of L lanes. All constants were fitted to medians measured on AVX-512
servers; ratios carry over better than times.

    dense    M K (T + 24 s) / 2 L       two FMAs a cycle, less efficient for few tokens (s = (T - 1) / 7 up to 1),
             at least M K bytes / b     the weight has to be read: b = 20 from the second-level caches, 10 from beyond;
                                        bf16 and f16 count as 4.7 times faster (AMX)
    kblock   nnz c(v)                   per tile of v vectors of tokens: c(1) = 2.0, c(2) = 2.7, c(4) = 4.0, bound by loads
             15 M blocks                per tile: start and end of a row in a block of columns
             0.4 (K + M) v L            per tile: the transposes of x and y
    gather   10.5 nnz / L + 10 M        per token: the gathers; start, end and total of a row
    each     15000                      the call
"""

from dataclasses import dataclass

from gossamer.passes.choose_format import block_width

UNKNOWN_TOKENS = 32  # assumed where the number of tokens is not known at compile time
_NONZERO = {1: 2.0, 2: 2.7, 4: 4.0}
_ROW, _ELEMENT, _CALL = 15.0, 0.4, 15_000.0
_GATHER, _GATHERED_ROW = 10.5, 10.0
FEW_TOKENS = 3  # up to which the gather schedule may be the better one
_WIDTH = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}
_NARROW_SPEEDUP = 4.7
_CACHE = 4 << 20  # bytes of weight a thread keeps close
_CYCLES_A_MICROSECOND = 3000.0


@dataclass(frozen=True)
class Prediction:
    """Predicted microseconds of a call on a core of 3 GHz, dense and sparse."""

    dense_us: float
    sparse_us: float

    @property
    def gain(self) -> float:
        """How many times faster sparse is."""
        return self.dense_us / self.sparse_us


def predict(m: int, k: int, tokens: int | None, density: float, dtype: str, vector_bits: int, threads: int = 1) -> Prediction:
    """The cost of a layer with an [m, k] weight of this density; `dtype` is "f64", "f32", "bf16" or "f16".

    `vector_bits` is the width of the target's vectors. More threads divide all but the call.
    """
    t = UNKNOWN_TOKENS if tokens is None else max(tokens, 1)
    lanes = vector_bits // (64 if dtype == "f64" else 32)
    dense = _dense(m, k, t, lanes, dtype, threads) / threads
    sparse = min(cost(m, k, t, lanes, density) for cost in ((_kblock, _gather) if t <= FEW_TOKENS else (_kblock,)))
    sparse = sparse / threads + _CALL
    return Prediction(dense / _CYCLES_A_MICROSECOND, sparse / _CYCLES_A_MICROSECOND)


def _dense(m: int, k: int, t: int, lanes: int, dtype: str, threads: int) -> float:
    width = _WIDTH[dtype]
    compute = m * k * (t + 24 * min(1.0, (t - 1) / 7)) / (2 * lanes)
    if width == 2:
        compute /= _NARROW_SPEEDUP
    size = m * k * width
    return max(compute, size / (20 if size <= _CACHE * threads else 10))


def _kblock(m: int, k: int, t: int, lanes: int, density: float) -> float:
    blocks = -(-k // block_width(m, k, density))
    full, left = divmod(t, 4 * lanes)
    tiles = [4] * full + ([1 if left <= lanes else 2 if left <= 2 * lanes else 4] if left else [])
    a_row = _ROW * m * blocks
    return sum(m * k * density * _NONZERO[v] + a_row + _ELEMENT * (k + m) * v * lanes for v in tiles)


def _gather(m: int, k: int, t: int, lanes: int, density: float) -> float:
    tokens = 4 if t == 3 else t
    return tokens * (_GATHER * m * k * density / lanes + _GATHERED_ROW * m)
