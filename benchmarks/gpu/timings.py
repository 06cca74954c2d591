"""Speed on a GPU: our kernels beside cuBLAS, cuSPARSE, torch's 2:4 and its Triton kernels for blocks, in turns."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.cases import Layer, Timing, timed
from benchmarks.gpu.kernels import Bundled, Call

_ROUNDS = 11
_SAMPLE_MS = 2.0  # least length of a sample
_MOST = 200  # calls of a sample
_FLUSHED = 256 << 20  # bytes written before a sample, more than any second-level cache


def time_all(kernels: dict[str, Bundled], device: torch.device) -> Iterator[dict[str, Any]]:
    """A record for every timing, with microseconds by contender, or why it cannot take part."""
    for timing in timed():
        layer = timing.layer
        weight = layer.weight(timing.density)
        operands = [t.to(device) for t in layer.operands(timing.tokens)]
        bundled = kernels[layer.name]
        made = {name: partial(make, bundled, weight, operands, device) for name, make in _contenders(layer).items()}
        record = {"layer": layer.name, "density": timing.density, "tokens": timing.tokens}
        yield {**record, **contest(made), **_work(timing, weight)}


def contest(contenders: Mapping[str, Callable[[], Callable[[], Any]]]) -> dict[str, Any]:
    """Microseconds of calls by contender, in turns; why it cannot take part, where making or calling it fails."""
    samplers: dict[str, Callable[[], float]] = {}
    refused: dict[str, str] = {}
    for name, make in contenders.items():
        try:
            samplers[name] = _sampler(make())
        except Exception as problem:
            refused[name] = f"{type(problem).__name__}: {problem}".splitlines()[0]
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(_ROUNDS):
        for name, sample in samplers.items():
            times[name].append(sample())
    return {
        "refused": refused,
        "microseconds": {name: statistics.median(samples) for name, samples in times.items()},
        "spread": {name: max(samples) / min(samples) - 1 for name, samples in times.items()},
    }


Make = Callable[[Bundled, Tensor, list[Tensor], torch.device], Callable[[], Any]]


def _contenders(layer: Layer) -> dict[str, Make]:
    if layer.element == "i8":
        return {"gossamer": _gossamer, "cublas": _dense_int8}
    found: dict[str, Make] = {"gossamer": _gossamer, "cublas": _dense, "cusparse": _csr}
    if layer.element == "f32":
        found["cublas-tf32"] = _dense_tf32
    if layer.block is not None:
        found["triton-bsr"] = _bsr
    if layer.two_four:
        found["cusparselt"] = _semi_structured
    return found


def _gossamer(bundled: Bundled, weight: Tensor, operands: list[Tensor], device: torch.device) -> Callable[[], Any]:
    call = Call(bundled, weight, device)
    out = torch.empty(operands[0].shape[0], bundled.layer.rows, dtype=bundled.layer.dtype, device=device)
    return lambda: call(operands, out)


def _dense(bundled: Bundled, weight: Tensor, operands: list[Tensor], device: torch.device) -> Callable[[], Any]:
    dense = weight.to(device)
    return lambda: bundled.layer.reference(dense, operands)


def _dense_int8(bundled: Bundled, weight: Tensor, operands: list[Tensor], device: torch.device) -> Callable[[], Any]:
    """The bare sums of 17 tokens at least, with fewer of which torch does not compute them."""
    factor = weight.to(device).t()
    x = F.pad(operands[0], (0, 0, 0, max(0, 17 - operands[0].shape[0])))
    return lambda: torch._int_mm(x, factor)


def _dense_tf32(bundled: Bundled, weight: Tensor, operands: list[Tensor], device: torch.device) -> Callable[[], Any]:
    dense = _dense(bundled, weight, operands, device)

    def call() -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        dense()
        torch.backends.cuda.matmul.allow_tf32 = False

    return call


def _csr(bundled: Bundled, weight: Tensor, operands: list[Tensor], device: torch.device) -> Callable[[], Any]:
    """The bare product: what follows it is not counted."""
    stored = weight.to(device).to_sparse_csr()
    x = operands[0].t()
    return lambda: stored @ x


def _bsr(bundled: Bundled, weight: Tensor, operands: list[Tensor], device: torch.device) -> Callable[[], Any]:
    """The bare product: what follows it is not counted."""
    size = bundled.layer.block
    assert size is not None
    stored = weight.to(device).to_sparse_bsr((size, size))
    return lambda: F.linear(operands[0], stored)


def _semi_structured(bundled: Bundled, weight: Tensor, operands: list[Tensor], device: torch.device) -> Callable[[], Any]:
    """torch's own 2:4 product, by cuSPARSELt or CUTLASS."""
    stored = torch.sparse.to_sparse_semi_structured(weight.to(device))
    return lambda: bundled.layer.reference(stored, operands)


def _sampler(call: Callable[[], Any]) -> Callable[[], float]:
    """Microseconds of a call, from one sample of many calls, captured in a graph where that works."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    once = _elapsed(call)
    count = max(1, min(_MOST, round(_SAMPLE_MS * 1000 / max(once, 1.0))))

    def many() -> None:
        for _ in range(count):
            call()

    run = many
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        run = graph.replay
    except RuntimeError:  # libraries that allocate or synchronise cannot be captured
        torch.cuda.synchronize()
    flush = torch.empty(_FLUSHED, dtype=torch.uint8, device="cuda")

    def sample() -> float:
        flush.zero_()
        return _elapsed(run) / count

    return sample


def _elapsed(run: Callable[[], Any]) -> float:
    """Microseconds on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def _work(timing: Timing, weight: Tensor) -> dict[str, Any]:
    """What has to be done at least: multiply-adds of nonzeros, and bytes of x, y and the nonzeros' values."""
    nonzeros = int(torch.count_nonzero(weight))
    size = weight.element_size()
    moved = (timing.tokens * (timing.layer.rows + timing.layer.columns) + nonzeros) * size
    return {"nonzeros": nonzeros, "flops": 2 * nonzeros * timing.tokens, "bytes": moved}
