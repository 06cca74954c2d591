"""OpenVINO in float32: the model converted from PyTorch, with OpenVINO's settings for latency on as many threads."""

from __future__ import annotations

import copy
import warnings
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.registry import Contender, Prepared, Unsupported


class Model(Protocol):
    """A model in a floating-point type, and what it is called with."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def inputs(self) -> tuple[Tensor, ...]: ...
    @property
    def precision(self) -> str: ...
    def __hash__(self) -> int: ...


def missing() -> str | None:
    return None if find_spec("openvino") else "OpenVINO is not installed: pip install openvino"


@lru_cache(maxsize=1)
def converted(problem: Model) -> Any:
    """The model as OpenVINO's, from float32 weights; `INFERENCE_PRECISION_HINT` says what they are computed in."""
    import openvino

    model, inputs = problem.model, problem.inputs
    if problem.precision != "f32":
        model = copy.deepcopy(model).float()
        inputs = tuple(x.float() if x.is_floating_point() else x for x in inputs)
    with warnings.catch_warnings(action="ignore"):  # of the tracer, about shapes that become constants
        return openvino.convert_model(model, example_input=inputs, input=[tuple(x.shape) for x in inputs])


@lru_cache(maxsize=1)
def core() -> Any:
    import openvino

    return openvino.Core()


def prepared(problem: Model, precision: str) -> Prepared:
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": precision,
    }
    request = core().compile_model(converted(problem), "CPU", settings).create_infer_request()
    inputs = [(x.float() if x.is_floating_point() else x).numpy() for x in problem.inputs]
    return Prepared(lambda: torch.from_numpy(request.infer(inputs, share_inputs=True, share_outputs=True)[0]))


def prepare(problem: Model) -> Prepared:
    if problem.precision != "f32":
        raise Unsupported(f"the model is {problem.precision}")
    return prepared(problem, "f32")


CONTENDER = Contender("OpenVINO", prepare, precision="f32", own_threads=True, missing=missing)
