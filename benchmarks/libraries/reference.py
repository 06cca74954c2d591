"""MLIR's own sparsifier: Gossamer's operation, eager, with the schedule "reference" for its kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from benchmarks.contenders.sparse import missing
from benchmarks.libraries.sparse_eager import FUNCTIONS, ours
from benchmarks.operations import Way, library


@lru_cache
def kernel(*call: Any) -> Any:
    """What stands in for `launch.kernel_of`."""
    from gossamer.sparsity.compiler.compile_kernel import compile_region

    build, spec, dtype = call
    return compile_region(build(spec, dtype), schedule="reference")


def scheduled(function: Callable[..., Tensor]) -> Way:
    def way(*given: Any) -> Callable[[], Tensor]:
        from gossamer.sparsity.operations import calls

        operands, fastest = ours(*given), calls.kernel_of

        def call() -> Tensor:
            calls.kernel_of = kernel
            try:
                return function(*operands)
            finally:
                calls.kernel_of = fastest

        return call

    return way


CONTENDER = library("MLIR sparsifier", {"sddmm": scheduled(FUNCTIONS["sddmm"])}, missing)
