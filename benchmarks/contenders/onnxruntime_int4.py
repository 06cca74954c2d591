"""ONNX Runtime with weights of 4 bits in groups of 32 (`MatMulNBits`), inputs in int8 where that is faster."""

from __future__ import annotations

import logging

from benchmarks.contenders import onnxruntime
from benchmarks.models import PrunedModel
from benchmarks.quantized import check
from benchmarks.registry import Contender, Prepared

_INPUTS_IN_INT8 = 4  # ONNX Runtime's "accuracy level"


def prepare(problem: PrunedModel) -> Prepared:
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    check(problem, "int4")
    model, like = onnxruntime.exported(problem)
    logging.getLogger().setLevel(logging.ERROR)
    quantizer = MatMulNBitsQuantizer(
        onnx.load_from_string(model), block_size=32, is_symmetric=True, accuracy_level=_INPUTS_IN_INT8
    )
    quantizer.process()
    return onnxruntime.prepared(problem, quantizer.model.model.SerializeToString(), like)


CONTENDER = Contender("ONNX Runtime int4", prepare, precision="int4", own_threads=True, missing=onnxruntime.missing)
