"""ONNX Runtime: the model exported to ONNX, run with its default optimisations, inputs and outputs bound to torch's memory."""

from __future__ import annotations

import logging
import tempfile
import warnings
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.models import PrunedModel
from benchmarks.registry import Contender, Prepared, Unsupported

_NUMPY = {torch.float32: "float32", torch.int64: "int64"}


def missing() -> str | None:
    absent = [name for name in ("onnxruntime", "onnx") if not find_spec(name)]
    return f"not installed: pip install {' '.join(absent)}" if absent else None


@lru_cache(maxsize=1)
def exported(problem: PrunedModel) -> tuple[bytes, Tensor]:
    """The model as ONNX, and a result of its shape and type."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"), tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        # The old exporter, for it takes a tenth of the time of the one that replaces it.
        torch.onnx.export(problem.model, problem.inputs, file, dynamo=False, opset_version=18)
        model = file.read_bytes()
    result: Tensor = problem.model(*problem.inputs)
    return model, result


def prepared(problem: PrunedModel, model: bytes, like: Tensor) -> Prepared:
    """A session of a model as ONNX, whose result is like this one."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")  # idle threads leave the cores to the others
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    inputs, result = [x.contiguous() for x in problem.inputs], torch.empty_like(like).contiguous()
    for node, x in zip(session.get_inputs(), inputs, strict=True):
        binding.bind_input(node.name, "cpu", 0, _NUMPY[x.dtype], tuple(x.shape), x.data_ptr())
    output = session.get_outputs()[0].name
    binding.bind_output(output, "cpu", 0, _NUMPY[result.dtype], tuple(result.shape), result.data_ptr())

    def call() -> Tensor:
        assert inputs  # their memory is bound
        session.run_with_iobinding(binding)
        return result

    return Prepared(call)


def prepare(problem: PrunedModel) -> Prepared:
    if problem.precision != "f32":
        raise Unsupported("float32 only: the CPU provider has few operators for bfloat16")
    return prepared(problem, *exported(problem))


CONTENDER = Contender("ONNX Runtime", prepare, precision="f32", own_threads=True, missing=missing)
