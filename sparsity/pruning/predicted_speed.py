"""Predicts the time of a layer at a density by the cost model, for a usual machine with this machine's vectors and threads."""

from functools import lru_cache

import torch

from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.cost_model import Prediction, predict
from gossamer.passes.schedules.machine_speed import Machine
from gossamer.runtime.data_cache import first_level_bytes
from gossamer.runtime.elements import FLOATS
from gossamer.runtime.target import host
from gossamer.sparsity.pruning.layers import Layer
from gossamer.sparsity.pruning.patterns import NM, VNM, Block, EqualRows, Pattern
from gossamer.sparsity.pruning.unfolding import is_depthwise


@lru_cache(maxsize=4096)
def _prediction(shape: tuple[int, int], dtype: torch.dtype, pattern: Pattern, density: float, tokens: int) -> Prediction:
    matrix = Matrix(
        *shape, 1, FLOATS[dtype], host().vector_bits, density,
        block=(pattern.rows, pattern.columns) if isinstance(pattern, Block) else None,
        nm=(pattern.n, pattern.m) if isinstance(pattern, NM) else None,
        vnm=(pattern.v, pattern.n, pattern.m) if isinstance(pattern, VNM) else None,
        skew=1.0 if isinstance(pattern, EqualRows | NM) else 1.25,
        features=host().instructions, l1d=first_level_bytes(),
    )  # fmt: skip
    return predict(matrix, tokens, torch.get_num_threads(), Machine.usual(host().vector_bits))


def microseconds(layer: Layer, pattern: Pattern, density: float, tokens: int) -> tuple[float, float]:
    """Returns the predicted microseconds of a call: dense, and as it will run, sparse or dense, whichever is faster.

    Depthwise convolutions run dense. Returns 0 for dtypes without kernels.
    """
    weight = layer.weight
    if weight.dtype not in FLOATS:
        return 0.0, 0.0
    found = _prediction((weight.shape[0], weight.shape[1]), weight.dtype, pattern, round(density, 4), tokens)
    is_sparse = density < 1 and found.by_schedule and not is_depthwise(layer.module)
    sparse = found.sparse_us if is_sparse else found.dense_us
    return found.dense_us, min(sparse, found.dense_us)
