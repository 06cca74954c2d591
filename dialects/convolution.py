"""The ops of the kernel dialect for convolutions: `kernel.convolve`, with a sparse weight, and `kernel.convolve_depthwise`,
whose results each read one channel. window.py describes the window that slides over the images."""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp, epilogue_problem, integers, verified
from gossamer.dialects.window import Window


def _problem(op: Any) -> str | None:
    x, w, result = (ir.RankedTensorType(v.type) for v in (op.x, op.w, op.result))
    window = integers(op.window)
    if len(window) != len(Window().numbers):
        return f"has a window of {len(window)} numbers"
    known = Window.of(window)
    if w.shape[1] * known.groups != x.shape[1] * known.taps or w.shape[0] != result.shape[1]:
        return f"has a weight {w} for {x.shape[1]} channels, {known.taps} taps and {result.shape[1]} results"
    if w.shape[0] % known.groups:
        return f"has {w.shape[0]} results in {known.groups} groups"
    if any(known.images) and min(known.output(*known.images)) < 1:
        return f"gives no pixel for images of {known.images}"
    return epilogue_problem(op)


class ConvolveOp(KernelOp, name="convolve", traits=[ext.Pure]):
    """y[n, m, q] = epilogue(sum_ck x[n, c, pixel that tap k reads for q] w[m, c taps + k]), c in the group of m.

    depth, height, width   sizes of the images
    window                 as `Window.numbers`
    reduction              dimension of w that is summed over: 1
    """

    takes = "x: t[images channels pixels], w: #t[filters inputs]"
    gives = "result: t[images filters places]"

    depth: ext.Operand[Any]
    height: ext.Operand[Any]
    width: ext.Operand[Any]
    window: ir.ArrayAttr
    lanes: ir.IntegerAttr
    reduction: ir.IntegerAttr
    epilogue: ext.Region

    verify_region_invariants = verified(_problem)


def _depthwise_problem(op: Any) -> str | None:
    w, window = ir.RankedTensorType(op.w.type), Window.of(integers(op.window))
    if w.shape[1] != window.taps:
        return f"has a weight {w} for {window.taps} taps"
    if any(window.images):
        return f"has images of {window.images}, which come with each call"
    return epilogue_problem(op)


class ConvolveDepthwiseOp(KernelOp, name="convolve_depthwise", traits=[ext.Pure]):
    """y[n, c, q] = epilogue(sum_k x[n, c, pixel that tap k reads for q] w[c, k]).

    height, width   sizes of the images
    window          as `Window.numbers`
    """

    takes = "x: t[images channels pixels], w: t[channels taps]"
    gives = "result: t[images channels places]"

    height: ext.Operand[Any]
    width: ext.Operand[Any]
    window: ir.ArrayAttr
    lanes: ir.IntegerAttr
    epilogue: ext.Region

    verify_region_invariants = verified(_depthwise_problem)
