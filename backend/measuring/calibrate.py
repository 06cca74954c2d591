"""Calibrates the cost model: measures how fast this machine is.

It times a call, dense products of three sizes, and the kernels of every family on a few reference weights. It uses one thread
and several numbers of tokens. This takes some seconds for an element type and happens once: at the first compilation of a
pruned model (see first_use.py), or by

    python -m gossamer.backend.measuring.calibrate            or            gossamer.calibrate()

The result is kept beside the kernel cache, for this CPU and these versions. Every later compilation predicts with it. Each call
is timed in several passes over all calls, so that a short disturbance (a tenth of a second) spoils only one time.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from gossamer.backend.devices import pace
from gossamer.backend.devices.calibrated import keep, settle, this_machine
from gossamer.backend.devices.identity import cpu_name
from gossamer.backend.devices.measured_times import DENSE
from gossamer.backend.devices.others import Others
from gossamer.backend.measuring.call_time import call_us
from gossamer.backend.measuring.measure import Call, Product, dense_product, fastest, random
from gossamer.backend.measuring.progress import Progress, progress
from gossamer.dialects.errors import OptionError
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.families import FAMILIES
from gossamer.passes.schedules.machine_speed import HALF, SPARSE, Curve, Machine, Speed
from gossamer.runtime.data_cache import first_level_bytes
from gossamer.runtime.elements import WEIGHTS
from gossamer.runtime.target import host

_TYPES = {name: dtype for dtype, name in WEIGHTS.items()}

_READ_SIZES = (1 << 19, 1 << 21, 1 << 23, 1 << 25)
_DENSE_SIZES = ((384, 384), (768, 1536), (2048, 2048))
_DENSE_TOKENS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
_LONGEST_US = 2e5  # dense products of int8 take seconds on some CPUs; longer ones take as long for each token
_TOKENS = (1, 2, 4, 8, 16, 32, 64)
_ROWS, _COLUMNS = 1024, 768
_PASSES, _ROUNDS = 3, 3

# Density, block and n:m of the reference weights. A family is measured on those that its storage is made for.
_WEIGHTS: tuple[tuple[float, tuple[int, int] | None, tuple[int, int] | None], ...] = (
    (SPARSE, None, None),
    (0.1, (16, 16), None),
    (0.5, None, (2, 4)),
)


def calibrate(elements: Sequence[str] = ("f32",), *, repeated: bool = False) -> Machine:
    """Measures the speed of this machine, keeps the result in the cache on disk, and returns it.

    elements  element types to measure: "f32", "f64", "bf16", "f16", "i8"
    repeated  says that this call repeats a calibration that other processes disturbed; Gossamer sets it itself

    The first compilation of a pruned model calls this function. Call it yourself if another program disturbed that measurement.
    Raises OptionError for an unknown element type.
    """
    if unknown := [e for e in elements if e not in _TYPES]:
        raise OptionError(f"unknown element type {unknown[0]!r}; there are {', '.join(_TYPES)}")
    machine, others = replace(this_machine(), name=cpu_name()), Others()
    steps = 2 + len(elements) * (len(_DENSE_SIZES) + len(_WEIGHTS) + 1)
    with _one_thread(), progress("gossamer calibrates", steps) as bar:
        bar.advance("reading memory")
        machine = replace(machine, read=_read())
        bar.advance("calls")
        machine = replace(machine, call_us=call_us())
        for element in elements:
            machine = machine.with_speed(element, _speed(element, bar))
    keep(machine)
    settle(others.disturb, repeated, others.beside)
    return machine


def _speed(element: str, bar: Progress) -> Speed:
    dtype, dense = _TYPES[element], []
    for rows, columns in _DENSE_SIZES:
        bar.advance(f"dense {element} {rows}x{columns}")
        dense.append((rows * columns * dtype.itemsize, _dense(rows, columns, dtype)))
    found: dict[str, dict[int, list[float]]] = {}
    half: dict[str, dict[int, list[float]]] = {}
    for density, block, nm in (*_WEIGHTS, (HALF, None, None)):
        matrix = Matrix(
            _ROWS, _COLUMNS, 1, element, host().vector_bits, density, block, nm=nm, skew=1.5, features=host().instructions,
            l1d=first_level_bytes(),
        )  # fmt: skip
        names = _specialists(matrix)
        bar.advance(f"{len(names)} kernels {element} {density:.0%}")
        _families(matrix, names, *((half, _TOKENS[::2]) if density == HALF and not nm else (found, _TOKENS)))
    return Speed(tuple(dense), _curves(found), _curves(half))


def _curves(rates: Mapping[str, Mapping[int, Sequence[float]]]) -> dict[str, Curve]:
    return {name: Curve(tuple((t, _mean(rates[name][t])) for t in sorted(rates[name]))) for name in rates}


def _read() -> Curve:
    """Returns the rate at which a sum reads memory, in GB/s by bytes, without the time of its call."""
    call, found = fastest({"sum": torch.ones(1, dtype=torch.float32).sum}, 1)["sum"], []
    for size in _READ_SIZES:
        us = fastest({"sum": torch.ones(size // 4, dtype=torch.float32).sum}, 1)["sum"]
        found.append((size, size / max(us - call, us / 2) / 1e3))
    return Curve(tuple(found))


def _dense(rows: int, columns: int, dtype: torch.dtype) -> Curve:
    """Returns the nanoseconds of a dense product for each token and 1000 elements of the weight, by tokens."""
    weight = random(rows, columns, dtype=dtype).t()
    products = {tokens: dense_product(random(tokens, columns, dtype=dtype), weight) for tokens in _DENSE_TOKENS}
    few = _DENSE_TOKENS[3]
    us = fastest({DENSE: products[few]}, 1, 1)[DENSE]
    counts = [tokens for tokens in _DENSE_TOKENS if tokens <= few or us * tokens / few < _LONGEST_US]
    times = zip(counts, _in_passes([{DENSE: products[tokens]} for tokens in counts]), strict=True)
    return Curve(tuple((tokens, us[DENSE] * 1e6 / (rows * columns * tokens)) for tokens, us in times))


def _in_passes(groups: Sequence[Mapping[str, Call]]) -> list[dict[str, float]]:
    """Returns the microseconds of each call: the least of several passes over all groups. Prefers undisturbed passes."""
    began, passes = pace.noted(), [[_one(calls) for calls in groups] for _ in range(_PASSES)]
    best, loops = list[dict[str, float]](), list[float]()
    for found in zip(*passes, strict=True):
        quiet = [each for each in found if each[1] is None or pace.counts(each[1])]
        counts = quiet or found
        best.append({name: min(us[name] for us, _ in counts) for name in found[0][0]})
        loops += [min(beside for _, beside in counts if beside is not None)] if counts[0][1] is not None else []
    pace.settle_for(began, max(loops, default=None))
    return best


def _one(calls: Mapping[str, Call]) -> tuple[dict[str, float], float | None]:
    """Returns the microseconds of each call, and of the loop of `pace` beside them."""
    began = pace.noted()
    return fastest(calls, 1, _ROUNDS), pace.since(began)


def _specialists(matrix: Matrix) -> list[str]:
    """Returns the families to measure on a reference weight. If it has a structure, only those that need one."""
    plain = replace(matrix, block=None, nm=None)
    able = [f for f in FAMILIES.values() if f.stores(matrix) is not None and f.cycles(matrix, 1) < math.inf]
    if matrix.block or matrix.nm:
        able = [f for f in able if f.stores(plain) is None]
    return [f.name for f in able]


def _families(matrix: Matrix, names: list[str], found: dict[str, dict[int, list[float]]], counts: Sequence[int]) -> None:
    """Adds to `found` the cycles per microsecond of each family on one reference weight, by tokens."""
    if not names:
        return
    product = Product(reference_weight(matrix), matrix)
    groups = [product.calls(tokens, [name for name in names if tokens <= FAMILIES[name].most]) for tokens in counts]
    for calls in groups:
        del calls[DENSE]
    for tokens, times in zip(counts, _in_passes(groups), strict=True):
        for name, us in times.items():
            rate = FAMILIES[name].cycles(matrix, tokens) / us
            found.setdefault(name, {}).setdefault(tokens, []).append(rate)


def reference_weight(matrix: Matrix) -> torch.Tensor:
    """Returns a random weight [M, K] with the density and the structure of a matrix."""
    generator = torch.Generator().manual_seed(1)
    m, k = matrix.rows, matrix.columns
    weight = random(m, k, dtype=_TYPES[matrix.element])
    if matrix.nm:
        n, group = matrix.nm
        kept = torch.rand(m, k // group, group, generator=generator).argsort(-1) < n
        weight *= kept.view(m, k)
    else:
        r, c = matrix.block or (1, 1)
        kept = torch.rand(-(-m // r), -(-k // c), generator=generator) < matrix.density
        weight *= kept.repeat_interleave(r, 0)[:m].repeat_interleave(c, 1)[:, :k]
    return weight


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _show(machine: Machine) -> None:
    """Prints what was measured."""
    print(f"{machine.name} reads " + ", ".join(f"{gbs:.0f} GB/s of {size / 1e6:.1f} MB" for size, gbs in machine.read.points))
    for element in sorted(machine.measured):
        speed = machine.speeds[element]
        print(f"\n{element}, one thread")
        tokens = [t for t, _ in speed.dense[0][1].points]
        print(f"{'tokens':<22}" + "".join(f"{t:>8}" for t in tokens))
        for size, curve in speed.dense:
            rates = [2e3 / ns for _, ns in curve.points]
            print(f"{f'dense GF/s {size / 1e6:.1f} MB':<22}" + "".join(f"{r:8.1f}" for r in rates))
        for density, curves in (("", speed.families), (f" {HALF:.0%}", speed.half)):
            for name, curve in curves.items():
                cells = {t: f"{rate:8.0f}" for t, rate in curve.points}
                print(f"{f'{name}{density} cycles/us':<22}" + "".join(cells.get(t, " " * 8) for t in tokens))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m gossamer.backend.measuring.calibrate", description=(calibrate.__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--elements", default="f32", help="element types, with commas (default f32)")
    try:
        _show(calibrate([e.strip() for e in parser.parse_args(arguments).elements.split(",")]))
    except OptionError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
