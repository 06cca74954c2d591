"""ONNX Runtime on the model quantized by its own `quantize_dynamic`: weights by channel, inputs quantized at every call."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from benchmarks.contenders import onnxruntime
from benchmarks.models import PrunedModel
from benchmarks.quantized import check
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel) -> Prepared:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    check(problem)
    model, like = onnxruntime.exported(problem)
    logging.getLogger().setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        source, file = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
        source.write_bytes(model)
        quantize_dynamic(source, file, per_channel=True, weight_type=QuantType.QInt8)
        return onnxruntime.prepared(problem, file.read_bytes(), like)


CONTENDER = Contender("ONNX Runtime int8", prepare, precision="int8", own_threads=True, missing=onnxruntime.missing)
