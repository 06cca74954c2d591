"""This machine's CPU, as a `Device` (see device.py)."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache

import torch

from gossamer.backend.devices.calibrated import this_machine
from gossamer.backend.devices.device_kernel import DTYPES, allocate
from gossamer.passes.framework.family import Matrix
from gossamer.passes.pipelines import SCHEDULES, Observer
from gossamer.passes.schedules import cost_model
from gossamer.passes.schedules.cost_model import Prediction
from gossamer.passes.schedules.families import FAMILIES
from gossamer.runtime.region_kernel import RegionKernel, recall_region
from gossamer.runtime.target import host
from gossamer.sparsity.compiler.compile_kernel import compile_region

_COPY_GBS = 5.0
"""The rate at which a matrix is transposed, in GB/s."""

_RENEWAL_CALL_US, _RENEWAL_US = 100.0, 1.2e-3
"""Microseconds to notice that a weight has changed, and to evaluate, compare and gather one element of it."""

_BF16_PRODUCTS = frozenset({"bf16dots", "amx"})

_predict = lru_cache(maxsize=1024)(cost_model.predict)  # graphs have many layers of one shape


class Cpu:
    """The CPU, with torch's number of threads."""

    target = "cpu"
    dtypes = DTYPES
    schedules = SCHEDULES
    allocate = staticmethod(allocate)
    edge_call = 50e3
    chains = reorders = measures = True

    @property
    def bits(self) -> int:
        return host().vector_bits

    @property
    def features(self) -> frozenset[str]:
        return host().instructions

    @property
    def rounds_to_bf16(self) -> bool:
        return not _BF16_PRODUCTS.isdisjoint(host().instructions)

    @property
    def call_us(self) -> float:
        return this_machine().call_us

    def predict(self, matrix: Matrix, tokens: int | None) -> Prediction:
        return _predict(matrix, tokens, torch.get_num_threads(), this_machine())

    def terms(self, matrix: Matrix, tokens: int, schedule: str) -> Mapping[str, float]:
        return asdict(cost_model.terms(FAMILIES[schedule], matrix, tokens, torch.get_num_threads(), this_machine()))

    def transpose_us(self, size: int) -> float:
        return size / (_COPY_GBS * 1e3)

    def renewal_us(self, elements: int) -> float:
        return _RENEWAL_CALL_US + _RENEWAL_US * elements

    def recall(self, request: str) -> RegionKernel | None:
        return recall_region(request)

    def compile(self, contract: str, schedule: str, observer: Observer | None, request: str) -> RegionKernel:
        return compile_region(contract, schedule=schedule, observer=observer, request=request)


CPU = Cpu()
