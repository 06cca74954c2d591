"""What the cost model predicted beside what was measured, and the rates that fit: `python -m benchmarks.gpu.fit timings.jsonl`.

    --out fit.json     also keep it
    --markdown         tables for docs/gpu_kernels.md

It lists two kinds of mistakes: layers that are dense by the better of both, but sparse by the fitted model (these must become
dense), and layers where another library's sparse kernel is faster than ours by more than 1.3 times (call that one instead).
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.gpu.cases import Layer
from gossamer.backend.devices.cuda_cost import EXPECTED, Rates, Roofline
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.families import GPU_FAMILIES

_PEERS = ("cusparse", "cusparselt", "triton-bsr")
_MUCH = 1.3


@dataclass(frozen=True)
class Measured:
    """A layer with some tokens: microseconds of the kernel, and of its contenders by name."""

    layer: Layer
    matrix: Matrix
    tokens: int
    times: dict[str, float]

    @classmethod
    def read(cls, record: dict[str, Any]) -> "Measured":
        """A line of the timings."""
        layer = Layer.from_json(record["layer"])
        size = layer.rows * layer.columns
        return cls(layer, matrix(layer, record["nonzeros"] / size), record["tokens"], record["microseconds"])

    @property
    def dense(self) -> float | None:
        """The faster of torch's dense products."""
        return min((us for name, us in self.times.items() if name.startswith("cublas")), default=None)

    def predicted(self, model: Roofline) -> tuple[float, float]:
        """Microseconds of our kernel and of torch's dense one."""
        ours = model.sparse_us(self.layer.schedule, self.matrix, self.tokens)
        return ours, model.dense_us(self.matrix, self.tokens, "cublas-tf32" in self.times)

    def __str__(self) -> str:
        return f"{self.layer.name}, {1 - self.matrix.density:.0%} zeros, {self.tokens} tokens"


def matrix(layer: Layer, density: float) -> Matrix:
    """What the planner knows of the weight."""
    block = (layer.block, layer.block) if layer.block else None
    nm = (2, 4) if layer.two_four else None
    return Matrix(layer.rows, layer.columns, 1, layer.element, 1024, density, block=block, nm=nm, vnm=layer.vnm)


def fitted(measured: Sequence[Measured], model: Callable[[Rates], Roofline]) -> Rates:
    """The rates whose predictions are nearest to the times, in logarithms; far ones count little."""
    schedules = sorted({each.layer.schedule for each in measured})

    def rates(logarithms: np.ndarray) -> Rates:
        dense, read, kernel, *cycles = np.exp(logarithms).tolist()
        return replace(EXPECTED, dense=dense, read=read, kernel_us=kernel, cycles=dict(zip(schedules, cycles, strict=True)))

    def errors(logarithms: np.ndarray) -> list[float]:
        return [error for each in measured for error in logarithmic_errors(each, model(rates(logarithms)))]

    start = np.log([EXPECTED.dense, EXPECTED.read, EXPECTED.kernel_us, *[1.0] * len(schedules)])
    return rates(least_squares(errors, start, loss="soft_l1", f_scale=0.1).x)


def logarithmic_errors(each: Measured, model: Roofline) -> list[float]:
    """Of our kernel and of torch's, as far as they were timed: positive where the prediction is too high."""
    pairs = zip(each.predicted(model), (each.times.get("gossamer"), each.dense), strict=True)
    return [math.log(predicted / found) for predicted, found in pairs if found]


def summary(measured: Sequence[Measured], model: Roofline) -> dict[str, Any]:
    """By schedule: how many were timed, median and largest factor of error, and how often sparse against dense is right."""
    found = {}
    for schedule in sorted({each.layer.schedule for each in measured}):
        here = [each for each in measured if each.layer.schedule == schedule]
        factors = [math.exp(abs(error)) for each in here for error in logarithmic_errors(each, model)]
        judged = [(each.predicted(model), each.times["gossamer"], each.dense) for each in here if "gossamer" in each.times]
        right = [(ours < dense) == (us < other) for (ours, dense), us, other in judged if other]
        found[schedule] = {
            "timings": len(here), "median factor": median(factors), "largest factor": max(factors),
            "right choice": sum(right) / max(len(right), 1),
        }  # fmt: skip
    return found


def mistakes(measured: Iterable[Measured], model: Roofline) -> dict[str, list[str]]:
    """Layers that the model makes sparse and that are slower so, and layers where another sparse kernel is much faster."""
    slower, beaten = list[str](), list[str]()
    for each in measured:
        us = each.times.get("gossamer")
        if us is None:
            continue
        ours, dense = each.predicted(model)
        if each.dense and ours < dense and us > each.dense:
            slower.append(f"{each}: {us:.1f} us, dense {each.dense:.1f}")
        peers = {name: each.times[name] for name in _PEERS if name in each.times}
        name = min(peers, key=peers.__getitem__, default=None)
        if name is not None and us > _MUCH * peers[name]:
            beaten.append(f"{each}: {us:.1f} us, {name} {peers[name]:.1f}")
    return {"sparse by the model and slower": slower, "another kernel is much faster": beaten}


def table(measured: Iterable[Measured]) -> str:
    """Speed over dense in Markdown: a row for each layer and density, a column for each number of tokens."""
    rows = dict[tuple[str, str], dict[int, str]]()
    counts = set[int]()
    for each in measured:
        if (us := each.times.get("gossamer")) and each.dense:
            rows.setdefault((each.layer.name, f"{1 - each.matrix.density:.0%}"), {})[each.tokens] = f"{each.dense / us:.2f}"
            counts.add(each.tokens)
    head = ["layer", "zeros", *(f"{count} tokens" for count in sorted(counts))]
    body = [[*key, *(cells.get(count, "") for count in sorted(counts))] for key, cells in sorted(rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fit the cost model of GPUs to timings.")
    parser.add_argument("timings", type=Path)
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--markdown", action="store_true", help="print tables of speed over dense")
    options = parser.parse_args(argv)
    machine, *records = [json.loads(line) for line in options.timings.read_text().splitlines()]
    measured = [Measured.read(record) for record in records if "layer" in record and record.get("microseconds")]
    measured = [each for each in measured if each.layer.schedule in GPU_FAMILIES]
    if not measured:
        print(f"{options.timings} has no timings of layers", file=sys.stderr)
        return 1
    peaks = tuple(machine["capability"]), machine["multiprocessors"] * machine["clock_mhz"], machine["bytes_a_us"]
    model = lambda rates: Roofline.with_peaks(*peaks, rates)
    rates = fitted(measured, model)
    found = {
        "machine": machine, "expected": asdict(EXPECTED), "fitted": asdict(rates),
        "errors before": summary(measured, model(EXPECTED)), "errors after": summary(measured, model(rates)),
        **mistakes(measured, model(rates)),
    }  # fmt: skip
    print(table(measured) if options.markdown else json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
