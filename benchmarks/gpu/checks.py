"""Correctness on a GPU: all kernels of the checked layers against dense products in f64, and what torch asks of a kernel."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import checked
from benchmarks.gpu.kernels import Bundled, Call

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest result

SMALL = 60_000  # elements of a weight that a sanitizer checks within seconds
_MULTIPLY_ZEROS = ("gpu-twofour", "gpu-vnm", "gpu-expand")  # schedules whose infinities spread as in the dense product


def check(kernels: dict[str, Bundled], device: torch.device, small: bool = False) -> Iterator[dict[str, Any]]:
    """A record for every kernel, layer and number of tokens; `ok` says whether it is right. `small`: of small layers only."""
    for layer, counts in checked():
        if small and layer.rows * layer.columns > SMALL:
            continue
        bundled = kernels[layer.name]
        for name in bundled.code.launches:
            for density in (0.3,) if small else (0.0, 0.3):
                weight = layer.weight(density)
                call = Call(bundled.only(name), weight, device)
                for tokens in counts:
                    operands = layer.operands(tokens)
                    out = call([t.to(device) for t in operands], _poison(tokens, layer.rows, layer.dtype, device))
                    expected = layer.reference(weight.double(), [t.double() for t in operands])
                    record = {"check": layer.name, "kernel": name, "density": density, "tokens": tokens}
                    yield {**record, **compared(out.cpu(), expected)}
    if small:
        return
    for name, of_torch in (("stream", _on_a_stream), ("graph", _in_a_graph), ("infinity", _infinity)):
        for layer in [layer for layer, _ in checked() if layer.rows == 512]:
            if name == "infinity" and (layer.schedule in _MULTIPLY_ZEROS or not layer.given.is_floating_point):
                continue
            yield {"check": name, "layer": layer.name, **of_torch(kernels[layer.name], device)}


def _poison(tokens: int, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((tokens, rows), float("nan"), dtype=dtype, device=device)


def compared(out: Tensor, expected: Tensor) -> dict[str, Any]:
    """The largest error of a result, beside the largest number in what was expected."""
    if out.numel() == 0:
        return {"error": 0.0, "ok": out.shape == expected.shape}
    known = expected.isfinite()  # the neutral element of a maximum is not
    error = torch.where(known, out.double() - expected, 0).abs().max().item()
    scale = max(torch.where(known, expected, 0).abs().max().item(), 1e-3)
    if not torch.equal(out[~known].double(), expected[~known].double()):
        return {"error": math.inf, "ok": False}
    return {"error": error / scale, "ok": error <= _TOLERANCE[out.dtype] * scale}  # false for NaN


def _prepared(bundled: Bundled, device: torch.device) -> tuple[Call, list[Tensor], Tensor, Callable[[], Tensor]]:
    layer = bundled.layer
    weight, operands = layer.weight(0.3), [t.to(device) for t in layer.operands(300)]
    out = _poison(300, layer.rows, layer.dtype, device)
    expected = lambda: layer.reference(weight.double(), [t.cpu().double() for t in operands])
    return Call(bundled, weight, device), operands, out, expected


def _on_a_stream(bundled: Bundled, device: torch.device) -> dict[str, Any]:
    """A launch waits for what its stream did before."""
    call, operands, out, expected = _prepared(bundled, device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        operands[0].mul_(2)
        call(operands, out)
    stream.synchronize()
    return compared(out.cpu(), expected())


def _in_a_graph(bundled: Bundled, device: torch.device) -> dict[str, Any]:
    """A captured launch reads its operands anew at every replay."""
    call, operands, out, expected = _prepared(bundled, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(operands, out)
    operands[0].copy_(bundled.layer.operands(300)[0])
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize(device)
    return compared(out.cpu(), expected())


def _infinity(bundled: Bundled, device: torch.device) -> dict[str, Any]:
    """An infinity in a column of x that no stored element meets reaches no result."""
    layer = bundled.layer
    weight, operands = layer.weight(1.0), layer.operands(40)
    size = layer.block or 1
    weight[:, :size] = 0
    operands[0][:, :size] = torch.inf
    call = Call(bundled, weight, device)
    out = call([t.to(device) for t in operands], _poison(40, layer.rows, layer.dtype, device))
    expected = layer.reference(weight[:, size:].double(), [operands[0][:, size:].double(), *(t.double() for t in operands[1:])])
    return compared(out.cpu(), expected)
