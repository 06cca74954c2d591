"""Speed on a GPU: our kernels beside cuBLAS, cuSPARSE, torch's 2:4 and its Triton kernels for blocks, in turns."""

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import chain, zip_longest
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
    """A record for every timing, with microseconds by contender, or why it cannot take part; a few of each kind first."""
    for (layer, density), counts in by_weight(timed()):
        weight, bundled = layer.weight(density), kernels[layer.name]
        call = cache(lambda bundled=bundled, weight=weight: Call(bundled, weight, device))
        for tokens in counts:
            operands = [t.to(device) for t in layer.operands(tokens)]
            made = {name: partial(make, call, layer, weight, operands) for name, make in _contenders(layer).items()}
            record = {"layer": layer.as_json(), "density": density, "tokens": tokens}
            yield {**record, **contest(made), **_work(layer, tokens, weight)}


def by_weight(timings: Iterable[Timing]) -> list[tuple[tuple[Layer, float], list[int]]]:
    """The numbers of tokens by layer and density: in turns of one kind of kernel each, within a kind in random order."""
    counts = dict[tuple[Layer, float], list[int]]()
    for timing in timings:
        counts.setdefault((timing.layer, timing.density), []).append(timing.tokens)
    kinds = dict[tuple[str, str], list[tuple[Layer, float]]]()
    for weight in counts:
        kinds.setdefault((weight[0].schedule, weight[0].element), []).append(weight)
    for weights in kinds.values():
        random.Random(0).shuffle(weights)
    turns = chain.from_iterable(zip_longest(*kinds.values()))
    return [(weight, counts[weight]) for weight in turns if weight is not None]


def call_each_kind(kernels: dict[str, Bundled], device: torch.device) -> None:
    """A few calls of one kernel of each schedule and type, with the weight of a large layer."""
    seen = set[tuple[str, str]]()
    for (layer, density), counts in by_weight(timed()):
        if (layer.schedule, layer.element) in seen:
            continue
        seen.add((layer.schedule, layer.element))
        call = Call(kernels[layer.name], layer.weight(density), device)
        operands = [t.to(device) for t in layer.operands(counts[-1])]
        for _ in range(2):
            call(operands, torch.empty(counts[-1], layer.rows, dtype=layer.dtype, device=device))
    torch.cuda.synchronize(device)


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


Make = Callable[[Callable[[], Call], Layer, Tensor, list[Tensor]], Callable[[], Any]]


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


def _gossamer(ours: Callable[[], Call], layer: Layer, weight: Tensor, operands: list[Tensor]) -> Callable[[], Any]:
    call, x = ours(), operands[0]
    out = torch.empty(x.shape[0], layer.rows, dtype=layer.dtype, device=x.device)
    return lambda: call(operands, out)


def _dense(ours: Callable[[], Call], layer: Layer, weight: Tensor, operands: list[Tensor]) -> Callable[[], Any]:
    dense = weight.to(operands[0].device)
    return lambda: layer.reference(dense, operands)


def _dense_int8(ours: Callable[[], Call], layer: Layer, weight: Tensor, operands: list[Tensor]) -> Callable[[], Any]:
    """The bare sums of 17 tokens at least, with fewer of which torch does not compute them."""
    factor = weight.to(operands[0].device).t()
    x = F.pad(operands[0], (0, 0, 0, max(0, 17 - operands[0].shape[0])))
    return lambda: torch._int_mm(x, factor)


def _dense_tf32(ours: Callable[[], Call], layer: Layer, weight: Tensor, operands: list[Tensor]) -> Callable[[], Any]:
    dense = _dense(ours, layer, weight, operands)

    def call() -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        dense()
        torch.backends.cuda.matmul.allow_tf32 = False

    return call


def _csr(ours: Callable[[], Call], layer: Layer, weight: Tensor, operands: list[Tensor]) -> Callable[[], Any]:
    """The bare product: what follows it is not counted."""
    stored = weight.to(operands[0].device).to_sparse_csr()
    x = operands[0].t()
    return lambda: stored @ x


def _bsr(ours: Callable[[], Call], layer: Layer, weight: Tensor, operands: list[Tensor]) -> Callable[[], Any]:
    """The bare product: what follows it is not counted."""
    size = layer.block
    assert size is not None
    stored = weight.to(operands[0].device).to_sparse_bsr((size, size))
    return lambda: F.linear(operands[0], stored)


def _semi_structured(ours: Callable[[], Call], layer: Layer, weight: Tensor, operands: list[Tensor]) -> Callable[[], Any]:
    """torch's own 2:4 product, by cuSPARSELt or CUTLASS."""
    stored = torch.sparse.to_sparse_semi_structured(weight.to(operands[0].device))
    return lambda: layer.reference(stored, operands)


def _sampler(call: Callable[[], Any]) -> Callable[[], float]:
    """Microseconds of a call, from one sample of many calls, captured in a graph where that works."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    once = elapsed(call)
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
        return elapsed(run) / count

    return sample


def elapsed(run: Callable[[], Any]) -> float:
    """Microseconds on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def _work(layer: Layer, tokens: int, weight: Tensor) -> dict[str, Any]:
    """What has to be done at least: multiply-adds of nonzeros, and bytes of x, y and the nonzeros' values."""
    nonzeros = int(torch.count_nonzero(weight))
    moved = (tokens * (layer.rows + layer.columns) + nonzeros) * weight.element_size()
    return {"nonzeros": nonzeros, "flops": 2 * nonzeros * tokens, "bytes": moved}
