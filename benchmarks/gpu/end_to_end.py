"""torch.compile(model.cuda(), backend="sparse"), whole: results, gradients, CUDA graphs and times.

    python end_to_end.py                    # writes end_to_end.jsonl; needs a GPU, gossamer and torch-mlir (for times Triton)
    python end_to_end.py --device cpu       # a rehearsal without a GPU: the same checks, no times
    python end_to_end.py --few              # one number of tokens for each case

Each record is a line of the file at once and says in `ok` whether it is right. What raises is a record, too, and the rest goes
on. The exit status is 1 if a record is not right.
"""

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gossamer
import gossamer.nn as points_nn
from benchmarks.gpu.networks import CASES, TOLERANCE, Case, Convolution, encoder
from gossamer.backend import sparse
from gossamer.runtime import cache_files
from gossamer.runtime.torch_internals import known_off

_SAMPLES, _CALLS = 15, 20
_PATIENCE = 300  # seconds that a process may take, of which a busy machine needs more than one with a GPU
_TYPES = 3  # of the cases, one of each type: they come before everything else, the others after it
_GPU: dict[str, Any] = {"gpu": "untested"}


def compiled(model: nn.Module, fullgraph: bool = True, **options: Any) -> Any:
    """The model with all its layers sparse, whether or not that pays."""
    torch.compiler.reset()
    counters.clear()
    return torch.compile(
        model, backend="sparse", fullgraph=fullgraph, options={"min_gain": 0, "strict": True, **_GPU, **options}
    )


def compared(actual: Tensor, expected: Tensor, regions: int | None, tolerance: float | None = None) -> dict[str, Any]:
    """Whether the result is right, by default up to the rounding of its type, and came out of so many sparse regions."""
    scale = max(expected.abs().max().item(), 1e-6)
    error = (actual.double().cpu() - expected.cpu()).abs().max().item() / scale
    found = counters["gossamer"]["regions"]
    most = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    return {"error": error, "regions": found, "ok": error <= most and regions in (None, found)}


def exactly(model: nn.Module, x: Tensor) -> Tensor:
    """The result in f64, on the CPU."""
    with torch.no_grad():
        return copy.deepcopy(model).cpu().double()(x.cpu().double())


def checks(case: Case, device: torch.device) -> Iterator[dict[str, Any]]:
    """Everything that a user may do with a compiled model."""
    model = case.model().to(device)
    inputs = {tokens: torch.randn(tokens, case.width, dtype=case.dtype, device=device) for tokens in case.tokens}
    x = inputs[33]
    with torch.no_grad():
        for tokens, each in inputs.items():
            yield {"check": f"{tokens} tokens", **compared(compiled(model)(each), exactly(model, each), 2, case.tolerance)}
        run = compiled(model)
        run(x)
        for each in (*model.parameters(), *model.buffers()):
            each.copy_(each * 1.5 if each.is_floating_point() else each.neg())
        yield {"check": "changed weights", **compared(run(x), exactly(model, x), 2, case.tolerance)}
        if device.type == "cuda":
            yield {"check": "another stream", **compared(on_a_stream(run, x), exactly(model, x), 2, case.tolerance)}
            yield {"check": "CUDA graph", **compared(in_a_graph(run, x), exactly(model, x), 2, case.tolerance)}
            yield {"check": "reduce-overhead", **compared(in_inductor_s_graphs(model, x), exactly(model, x), 2, case.tolerance)}
    yield from training(model, x, case.tolerance)


def training(model: nn.Module, x: Tensor, tolerance: float) -> Iterator[dict[str, Any]]:
    """The gradients of the parameters, and of x."""
    exact, given = copy.deepcopy(model).cpu().double(), x.cpu().double().requires_grad_()
    exact(given).square().sum().backward()
    x = x.detach().requires_grad_()
    compiled(model)(x).square().sum().backward()
    pairs = [("input", x, given), *((name, p, exact.get_parameter(name)) for name, p in model.named_parameters())]
    for name, actual, expected in pairs:
        assert actual.grad is not None and expected.grad is not None
        yield {"check": f"gradient of {name}", **compared(actual.grad, expected.grad, 4, tolerance)}


def on_a_stream(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The result of a call on a stream of its own, which has to wait for x."""
    stream, late = torch.cuda.Stream(x.device), torch.zeros_like(x)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late.copy_(x)
        result = run(late)
    stream.synchronize()
    return result


def in_a_graph(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The result of a replay with an input that was not there when the graph was captured."""
    static, stream = torch.zeros_like(x), torch.cuda.Stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        run(static)
    torch.cuda.current_stream(x.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(static)
    static.copy_(x)
    graph.replay()
    torch.cuda.synchronize(x.device)
    return result


def in_inductor_s_graphs(model: nn.Module, x: Tensor) -> Tensor:
    """The result under mode="reduce-overhead", of a weight that changed after graphs were captured."""
    torch.compiler.reset()
    counters.clear()
    options = gossamer.Options(min_gain=0, gpu="untested")
    run = torch.compile(model, backend=lambda gm, inputs: sparse(gm, inputs, mode="reduce-overhead", options=options))
    for _ in range(3):
        run(x)
    for parameter in model.parameters():
        parameter.mul_(0.5)
    return run(x).clone()


def sparse_tensors(device: torch.device) -> Iterator[dict[str, Any]]:
    """A graph's adjacency times features, with gradients."""
    edges, weights = torch.randint(0, 1000, (2, 8000)), torch.randn(8000)
    exact = torch.zeros(1000, 1000, dtype=torch.float64).index_put((edges[1], edges[0]), weights.double(), accumulate=True)
    a = gossamer.SparseTensor.from_edge_index(edges.to(device), weights.to(device), (1000, 1000))
    x = torch.randn(1000, 64, device=device, requires_grad=True)
    counters.clear()
    result = a @ x
    yield {"check": "SparseTensor @ x", **compared(result.detach(), exact @ x.detach().cpu().double(), 0)}
    result.sum().backward()
    assert x.grad is not None
    yield {"check": "SparseTensor.T @ gradient", **compared(x.grad, exact.sum(0)[:, None].expand(-1, 64), 0)}
    stored, infinite = exact != 0, exact.masked_fill(exact == 0, -torch.inf)
    operations = {
        "a @ a": (lambda: a @ a, exact @ exact),
        "a + a.T": (lambda: a + a.t(), exact + exact.t()),
        "a * a.T": (lambda: a * a.t(), exact * exact.t()),
        "softmax": (lambda: a.softmax(1), infinite.softmax(1).nan_to_num()),
        "log_softmax": (lambda: a.log_softmax(1), infinite.log_softmax(1).masked_fill(~stored, 0)),
        "amax of rows": (lambda: a.amax(1), exact.amax(1)),
        "sum of columns": (lambda: a.sum(0), exact.sum(0)),
        "CSC": (lambda: a.to_format(gossamer.Format.CSC), exact),
        "rows": (lambda: a[10:700:3], exact[10:700:3]),
        "cat": (lambda: torch.cat([a, a], 1), torch.cat([exact, exact], 1)),
    }
    with gossamer.strict():
        for name, (operation, expected) in operations.items():
            out = operation()
            whole = out.to_dense() if isinstance(out, gossamer.SparseTensor) else out
            yield {"check": f"SparseTensor: {name}", **compared(whole, expected, 0)}
    target = torch.randn(1000, 2, device=device)
    values = torch.randn(1000, 2, 16, device=device)
    result = gossamer.graph_attention(a, values, target=target, source=target, slope=0.2)
    of_edge = target.cpu().double()[:, None] + target.cpu().double()
    scores = torch.nn.functional.leaky_relu(of_edge, 0.2).masked_fill(~stored[:, :, None], -torch.inf)
    attended = torch.einsum("ijh,jhf->ihf", scores.softmax(1).nan_to_num(), values.cpu().double())
    yield {"check": "graph attention", **compared(result, attended, 0)}


def points(device: torch.device) -> Iterator[dict[str, Any]]:
    """A submanifold and a strided convolution of points, forward and backward, beside torch's dense convolutions."""
    sites = torch.rand(8, 8, 8) < 0.3
    features, where = torch.randn(int(sites.sum()), 16), sites.nonzero()
    indices = torch.cat([torch.zeros(len(where), 1, dtype=torch.long), where], 1).int()
    for name, layer in {
        "submanifold": points_nn.SubMConv3d(16, 24, 3, padding=1, bias=False),
        "strided": points_nn.SparseConv3d(16, 24, 3, stride=2, padding=1, bias=False),
    }.items():
        ours, given = copy.deepcopy(layer).to(device), features.clone().to(device).requires_grad_()
        out = ours(points_nn.SparseConvTensor(given, indices.to(device), [8, 8, 8], 1))
        out.features.square().sum().backward()
        exact, exactly_given = layer.double(), features.double().requires_grad_()
        expected = exact(points_nn.SparseConvTensor(exactly_given, indices, [8, 8, 8], 1))
        expected.features.square().sum().backward()
        assert given.grad is not None and exactly_given.grad is not None
        yield {"check": f"points: {name}", **compared(out.dense().detach(), expected.dense().detach(), None)}
        yield {"check": f"points: gradient, {name}", **compared(given.grad, exactly_given.grad, None)}


def graph_layers(device: torch.device) -> Iterator[dict[str, Any]]:
    """PyTorch Geometric's GCN and GAT, compiled."""
    from torch_geometric.nn import GATConv, GCNConv

    edges, x = torch.randint(0, 1000, (2, 8000)), torch.randn(1000, 64)
    for layer in (GCNConv(64, 32), GATConv(64, 16, heads=2)):
        expected = copy.deepcopy(layer).double()(x.double(), edges)
        run = compiled(layer.to(device), fullgraph=False)
        record = compared(run(x.to(device), edges.to(device)).detach(), expected.detach(), None)
        yield {"check": type(layer).__name__, **record, "ok": record["ok"] and record["regions"] > 0}


def encoders(device: torch.device) -> Iterator[dict[str, Any]]:
    """Encoders of all types, beside f64."""
    ids = torch.randint(0, 1000, (8, 128))
    for dtype in TOLERANCE:
        model = encoder(dtype)
        with torch.no_grad():
            expected = copy.deepcopy(model).double()(ids).last_hidden_state
            out = compiled(model.to(device), fullgraph=False)(ids.to(device)).last_hidden_state
        record = compared(out, expected, None, 8 * TOLERANCE[dtype])  # six layers of rounding
        yield {"check": f"encoder {dtype}", **record, "ok": record["ok"] and record["regions"] >= 12}


def two_processes(device: torch.device) -> Iterator[dict[str, Any]]:
    """Two processes that compile and run the same model at once."""
    command = [sys.executable, __file__, "--device", str(device), "--child"]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for number, child in enumerate(children):
            line = (child.communicate(timeout=_PATIENCE)[0].strip().splitlines() or ["{}"])[-1]
            yield {"check": f"process {number} of 2", **json.loads(line), "ok": child.returncode == 0}
    finally:
        for child in children:
            child.kill()


def message_passing(device: torch.device) -> Iterator[dict[str, Any]]:
    """A layer of a graph network, compiled, with the gradients of its input and of the weights of edges."""
    model, edges = Convolution(), torch.randint(0, 1000, (2, 8000))
    x, weight = torch.randn(1000, 64), torch.randn(8000)
    exact = copy.deepcopy(model).double()
    given = [t.double().requires_grad_() for t in (x, weight)]
    ours = [t.clone().to(device).requires_grad_() for t in (x, weight)]
    run = compiled(model.to(device))
    result = run(ours[0], edges.to(device), ours[1])
    expected = exact(given[0], edges, given[1])
    found = gossamer.explain(model, x.to(device), edges.to(device), weight.to(device), options={"min_gain": 0})
    recognised = [str(decision) for decision in found.decisions if "aggregation" in str(decision)]
    record = compared(result.detach(), expected.detach(), counters["gossamer"]["regions"])
    yield {"check": "message passing", "decisions": recognised, **record, "ok": record["ok"] and bool(recognised)}
    result.square().sum().backward()
    expected.square().sum().backward()
    for name, one, other in zip(("x", "weights"), ours, given, strict=True):
        assert one.grad is not None and other.grad is not None
        yield {
            "check": f"message passing: gradient of {name}",
            **compared(one.grad, other.grad, counters["gossamer"]["regions"]),
        }


def machine_code(device: torch.device) -> Iterator[dict[str, Any]]:
    """What the driver has linked is in the cache on disk, and the next process finds it there."""
    directory = cache_files.directory()
    kept = list(directory.glob("cubin-*")) if directory is not None else []
    yield {"check": "machine code on disk", "files": len(kept), "ok": bool(kept) or device.type != "cuda"}


def one_of_two(device: torch.device) -> int:
    """What each of them does. Returns the exit status."""
    model, x = CASES[0].model().to(device), torch.randn(33, CASES[0].width, device=device)
    with torch.no_grad():
        record = compared(compiled(model)(x), exactly(model, x), 2)
    print(json.dumps(record))
    return int(not record["ok"])


def times(name: str, make: Callable[[], nn.Module], inputs: Sequence[Tensor], device: torch.device) -> Iterator[dict[str, Any]]:
    """Microseconds of a call, dense and sparse as predicted to pay, on the device's own clock."""
    model = make().to(device).eval()
    for x in inputs:
        x, found = x.to(device), {}
        for backend in ("eager", "inductor", "sparse"):
            torch.compiler.reset()
            options = _GPU if backend == "sparse" else None
            run = model if backend == "eager" else torch.compile(model, backend=backend, options=options)
            with torch.no_grad():
                found[backend] = _microseconds(lambda: run(x))  # noqa: B023  # called at once
        decisions = [str(decision) for decision in gossamer.explain(model, x, options=_GPU).decisions]
        yield {"time": name, "shape": list(x.shape), "us": found, "decisions": decisions}


def _microseconds(call: Callable[[], object]) -> float:
    for _ in range(5):
        call()
    samples = []
    for _ in range(_SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_CALLS):
            call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / _CALLS)
    return median(samples)


def attempts(device: torch.device, few: bool) -> Iterator[tuple[str, Callable[[], Iterator[dict[str, Any]]]]]:
    """Everything, by name, in order of worth."""
    cases = [replace(case, tokens=(33,)) if few else case for case in CASES]
    networks = [(case.name, partial(checks, case, device)) for case in cases]
    others = (encoders, message_passing, graph_layers, points, sparse_tensors, machine_code, two_processes)
    yield from networks[:_TYPES]
    yield from ((more.__name__, partial(more, device)) for more in others)
    yield from networks[_TYPES:]
    if device.type == "cuda":
        for case in CASES:
            inputs = [torch.randn(tokens, case.width, dtype=case.dtype) for tokens in case.tokens]
            yield case.name, partial(times, case.name, case.model, inputs, device)
        for dtype in TOLERANCE:
            ids = [torch.randint(0, 1000, (batch, 128)) for batch in (1, 8)]
            yield f"encoder {dtype}", partial(times, f"encoder {dtype}", partial(encoder, dtype), ids, device)


def attempted(name: str, attempt: Callable[[], Iterator[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The records of an attempt. What is not installed is left out; what raises is the last record."""
    try:
        for record in attempt():
            yield {"case": name, **record}
    except ModuleNotFoundError as missing:
        yield {"case": name, "left out": str(missing)}
    except Exception as failure:
        yield {"case": name, "raised": f"{type(failure).__name__}: {failure}"[:2000], "ok": False}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Check and time the whole plugin on a GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--few", action="store_true", help="one number of tokens for each case")
    parser.add_argument("--out", type=Path, default=Path("end_to_end.jsonl"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    if options.child:
        return one_of_two(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU, as a rehearsal"
    right = True
    with options.out.open("w") as file:
        first = {"device": name, "torch": torch.__version__, "gossamer": gossamer.__version__, "off": known_off()}
        records = (record for attempt in attempts(device, options.few) for record in attempted(*attempt))
        for record in chain([first], records):
            right &= record.get("ok", True)
            print(json.dumps(record), file=file, flush=True)
            print(json.dumps(record), flush=True)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
