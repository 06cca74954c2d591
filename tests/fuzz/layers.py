"""python -m tests.fuzz.layers --kind points --count 500 --seed 0: random layers of a kind, against dense float64.

quantized   `gossamer.quantize`, calibrated or not, by the formula in integers
masked      training steps of parameters under masks, some of which change on the way
experts     `grouped_mm` with pruned weights, for any share of the tokens
mixtures    layers of a mixture of experts in all spellings, with their gradients
points      convolutions of points, one after the other, with their gradients
low-rank    pruned layers with adapters, or sums of a sparse matrix and factors, with their gradients
structures  products with Kronecker products and the like, Monarch matrices, many adapters, einsums of several operands
routed      `gossamer.routed_mlp` and `routed_linear`, with their gradients

A case that fails is printed as a program. It leaves what it computed, and what that should be, in lists `found`, `expected`.
A run that is interrupted says how many cases it ran.
"""

import argparse
import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from gossamer.backend.report.report import collect
from tests.fuzz.low_rank import low_rank
from tests.fuzz.routed import routed
from tests.fuzz.structures import structures

HEADER = """import copy

import gossamer
import gossamer.nn as spconv
import torch
import torch.nn.functional as F
from torch import inf, nan, nn
from torch.nn.utils import parametrize
from tests.fuzz.pruned import Mask, prune_
from tests.fuzz.references import by_experts, by_integers, on_grids
from tests.sparsity.routed import by_tokens, linear_by_tokens, quantized
"""
OPTIONS = "backend='sparse', fullgraph=True, options=dict(min_gain=0, strict=True, dense='eager')"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def quantized(chance: random.Random) -> str:
    """A layer and an activation, calls of several sizes, maybe a NaN, maybe other weights on the way."""
    k, m = (chance.choice((1, 3, 16, 31, 64, 65, chance.randint(1, 200))) for _ in range(2))
    dtype = chance.choice(("float32", "float32", "float32", "bfloat16", "float16"))
    density, shape = chance.choice((0, 0.05, 0.2, 0.5)), chance.choice(((1, 1), (4, 4), (1, 4), (2, 2), "rows"))
    act = chance.choice(("nn.Identity()", "nn.ReLU()", "nn.GELU()", "nn.SiLU()"))
    shift = chance.choice((-3, 0, 0, 0.5, 100))
    data = chance.choice(("None", f"[(torch.randn(20, {k}) + {shift}).to(torch.{dtype})]"))
    lines = [
        f"model = nn.Sequential(nn.Linear({k}, {m}, bias={chance.random() < 0.6}), {act}).to(torch.{dtype}).eval()",
        f"prune_(model, {chance.choice(('in place', 'parametrize'))!r}, {density}, {shape!r})",
        f"gossamer.quantize(model, {data}, only=[nn.Linear])",
        f"compiled = torch.compile(model, dynamic={chance.choice((None, True, False))}, {OPTIONS})",
    ]
    change, dead = chance.random() < 0.3, chance.random() < 0.3
    for call in range(3):
        sizes = chance.choice(("", "1, ", "2, 3, ", f"{chance.choice((2, 8, 9, 33, 64, 130))}, ", "0, "))
        lines += [f"x = (torch.randn({sizes}{k}) * {chance.choice((1, 1e-3, 1e3))}).to(torch.{dtype})"]
        if dead and sizes and sizes != "0, ":
            lines += [f"x[0, ..., {chance.randrange(k)}] = {chance.choice(('nan', 'inf', '-inf'))}"]
        lines += [
            "found.append(compiled(x))",
            "expected.append(model[1](by_integers(x, model[0])).to(x.dtype))",
        ]
        if change and call == 0:
            lines += ["model[0].weight_int8.copy_(model[0].weight_int8.roll(1, 1))"]  # sums of rows stay
            lines += ["model[0].weight_scale.mul_(0.5)"]
    return "\n".join(["with torch.no_grad():", *("    " + line for line in lines)])


def masked(chance: random.Random) -> str:
    """Three steps of SGD, of batches of different sizes; the twin in float64 makes the same ones."""
    widths = [chance.choice((8, 16, 33, 64, 96, 130)) for _ in range(3)]
    density, soft = chance.choice((0.02, 0.1, 0.2, 0.5)), chance.random() < 0.2
    act = chance.choice(("nn.ReLU()", "nn.GELU()", "nn.Tanh()"))
    dtype = chance.choice(("float32", "float32", "float64"))
    bias = chance.random() < 0.7
    tokens = [chance.choice((1, 7, 64, 100)) for _ in range(3)]
    tokens = tokens if chance.random() < 0.5 else tokens[:1] * 3
    dims = chance.random() < 0.4
    change = chance.choice(("", "", "mask", "values", "nan"))
    lines = [
        f"model = nn.Sequential(nn.Linear({widths[0]}, {widths[1]}, bias={bias}), {act}, nn.Linear({widths[1]}, {widths[2]}))",
        f"model = model.to(torch.{dtype})",
        "for layer in (model[0], model[2]):",
        f"    mask = (torch.rand_like(layer.weight) < {density}).to(layer.weight){' * 1.5' if soft else ''}",
        "    parametrize.register_parametrization(layer, 'weight', Mask(mask))",
        "twin = copy.deepcopy(model).double()",
        f"compiled = torch.compile(model, dynamic={chance.choice((None, True))}, {OPTIONS})",
        f"for step, tokens in enumerate({tokens}):",
        f"    x = torch.randn({'2, ' if dims else ''}tokens, {widths[0]}, dtype=torch.{dtype}).requires_grad_()",
        "    for each, call, results in ((model, compiled, found), (twin, twin, expected)):",
        "        leaf = x.detach().to(each[2].bias).requires_grad_()",
        "        y = call(leaf)",
        "        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()",
        "        results += [y.detach(), leaf.grad, *(p.grad for p in each.parameters())]",
        "        with torch.no_grad():",
        "            for p in each.parameters():",
        "                p.sub_(0.01 * p.grad)",
        "                p.grad = None",
    ]
    below = "            "
    if change == "mask":
        lines += [
            f"{below}torch.manual_seed(step)",
            f"{below}mask = each[0].parametrizations.weight[0].mask",
            f"{below}mask.copy_(torch.rand(mask.shape) < {chance.choice((0.05, density, 1.0))})",
        ]
    elif change == "values":
        lines += [f"{below}each[0].parametrizations.weight.original.copy_(each[0].parametrizations.weight.original.flip(0))"]
    elif change == "nan":
        lines += [
            f"{below}kept = each[2].parametrizations.weight[0].mask.nonzero()",
            f"{below}if len(kept): each[2].parametrizations.weight.original[tuple(kept[0])] = nan",
        ]
    return "\n".join(lines)


def experts(chance: random.Random) -> str:
    """Shares of every kind, among them none at all; maybe other weights on the way."""
    count, k, m = chance.choice((1, 2, 3, 8)), chance.choice((8, 16, 40, 72)), chance.choice((8, 24, 32, 65))
    dtype = chance.choice(("float32", "float32", "float64", "bfloat16"))
    if dtype == "bfloat16":
        k, m = 8 * (k // 8), 8 * (m // 8)
    density = chance.choice((0.0, 0.05, 0.2, 0.4))
    transposed = chance.random() < 0.7
    fallback = "torch.ops.transformers.grouped_mm_fallback(x, w, ends)"
    product = "F.grouped_mm(x, w, offs=ends)" if dtype == "bfloat16" else fallback
    shape = f"{count}, {m}, {k}" if transposed else f"{count}, {k}, {m}"
    lines = [
        "import transformers.integrations.moe",
        f"weights = nn.Parameter((torch.randn({shape}) * (torch.rand({shape}) < {density})).to(torch.{dtype}))",
        "with torch.no_grad(): weights[0] = 0" if chance.random() < 0.2 else "",
        "def layer(x, ends):",
        f"    w = weights{'.transpose(-2, -1)' if transposed else ''}",
        f"    return {chance.choice(('', 'F.silu', 'F.relu'))}({product})",
        f"compiled = torch.compile(layer, dynamic={chance.choice((None, True))}, {OPTIONS})",
    ]
    act = lines[-2].removeprefix("    return ").split("(")[0]
    for call in range(3):
        kind = chance.random()
        counts = [0 if chance.random() < 0.3 else chance.choice((1, 2, 5, 31, 64)) for _ in range(count)]
        counts = [0] * count if kind < 0.1 else [1] * count if kind < 0.25 else counts
        lines += [
            f"counts = {counts}",
            f"x = torch.randn({sum(counts)}, {k}).to(torch.{dtype})",
            "ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)",
            "with torch.no_grad():",
            "    found.append(compiled(x, ends))",
            f"    expected.append({act}(by_experts(x, weights{'' if transposed else '.mT'}, counts)).to(x.dtype))",
        ]
        if call == 0 and chance.random() < 0.4:
            lines += ["with torch.no_grad(): " + chance.choice(("weights.mul_(-2)", "weights.copy_(weights.flip(0, 1))"))]
    return "\n".join(lines)


def mixtures(chance: random.Random) -> str:
    """A spelling, and batches of different sizes; maybe all tokens go to few experts, maybe with gradients."""
    kinds = ("Sorted", "SortedAndAdded", "SortedTwice", "Gathered", "Einsum", "Masked", "Where", "Assigned", "OneHot")
    kind = chance.choice(kinds)
    experts = chance.choice((2, 3, 5, 8, 17))
    top = chance.choice([n for n in (1, 2, 3, 8) if n <= experts])
    columns, hidden = chance.choice((8, 16, 24, 33, 64)), chance.choice((4, 8, 17, 32))
    act = chance.choice(("F.silu", "F.silu", "F.gelu", "F.relu", "torch.tanh", "torch.sigmoid", "F.elu"))
    trains, opens = chance.random() < 0.4, kind in ("Where", "Assigned", "OneHot")
    lines = [
        "import transformers.integrations.moe",
        "from tests.backend import experts_in_models as models",
        f"model = models.{kind}({top}, {experts}, {columns}, {hidden}, {act})",
        chance.choice(("", "with torch.no_grad(): model.router.weight.copy_(model.router.weight[:, :1] * 3)")),
        "wide = copy.deepcopy(model).double()",
        f"torch._dynamo.config.capture_dynamic_output_shape_ops = {opens}",
        f"compiled = torch.compile(model, dynamic={'None' if opens else chance.choice((None, True))}, {OPTIONS})",
    ]
    for call in range(4):
        tokens = chance.choice((1, 2, 5, 9, 16, 31, 64, 130))
        lines += [
            f"x = (torch.randn({tokens}, {columns}) * {chance.choice((1, 1, 0.01, 10))}).requires_grad_({trains})",
            "far = x.detach().double().requires_grad_()",
            f"with torch.set_grad_enabled({trains}):",
            "    y = compiled(x)",
            "z = models.exact(wide, far)",
            "found.append(y)",
            "expected.append(z.float())",
        ]
        if trains:
            lines += [
                "upstream = torch.randn_like(y)",
                "y.backward(upstream)",
                "z.backward(upstream.double())",
                "of = zip((x, *model.parameters()), (far, *wide.parameters()))",
                "pairs = [(a.grad.clone(), b.grad.float()) for a, b in of]",
                "found += [a for a, _ in pairs]",
                "expected += [b for _, b in pairs]",
                "model.zero_grad(); wide.zero_grad()",
            ]
        if call == 1 and chance.random() < 0.4:
            lines += ["with torch.no_grad(): [each.down.mul_(-2) for each in (model, wide)]"]
    return "\n".join(lines)


def points(chance: random.Random) -> str:
    """Convolutions of the same sites, of coarser ones, and back, eager or in a graph."""
    dims, batch = chance.choice((1, 2, 2, 3, 3)), chance.randint(1, 3)
    shape = [chance.randint(1, {1: 40, 2: 14, 3: 8}[dims]) for _ in range(dims)]
    dtype = chance.choice(("float32", "float32", "float64"))
    channels = [chance.choice((1, 3, 8, 16, 17, 33)) for _ in range(5)]
    layers, keys, now = [], [], list(shape)
    for c, made in pairwise(channels[: chance.randint(2, 5)]):
        bias = f"bias={chance.random() < 0.5}"
        kind = chance.choice(("SubM", "SubM", "Sparse", "Sparse", "Inverse", "Transpose", "Max", "Avg"))
        if kind == "Inverse" and not keys:
            kind = "SubM"
        if kind == "SubM":
            kernel, dilation = ([chance.choice(known) for _ in range(dims)] for known in ((1, 3, 3, 5), (1, 2)))
            numbers = f"{kernel}, dilation={dilation}"
            layers.append(f"spconv.SubMConv{dims}d({c}, {made}, {numbers}, {bias})")
        elif kind == "Transpose":
            kernel = [chance.randint(1, 3) for _ in now]
            stride = [chance.randint(1, 2) if n < 9 else 1 for n in now]
            now = [(n - 1) * s + k for n, k, s in zip(now, kernel, stride, strict=True)]
            keys.clear()
            layers.append(f"spconv.SparseConvTranspose{dims}d({c}, {made}, {kernel}, {stride}, {bias})")
        elif kind in ("Max", "Avg"):
            kernel = [chance.randint(1, min(3, n)) for n in now]
            stride, padding = [chance.randint(1, 2) for _ in now], [chance.randint(0, k // 2) for k in kernel]
            now = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(now, padding, kernel, stride, strict=True)]
            keys.clear()
            layers.append(f"spconv.Sparse{kind}Pool{dims}d({kernel}, {stride}, {padding})")
            layers.append(f"spconv.SubMConv{dims}d({c}, {made}, 1, {bias})")
        elif kind == "Sparse":
            kernel = [chance.randint(1, min(3, n)) for n in now]
            stride, padding = ([chance.randint(low, high) for _ in now] for low, high in ((1, 2), (0, 1)))
            padding = [min(p, k - 1) for p, k in zip(padding, kernel, strict=True)]
            keys.append((f"k{len(layers)}", kernel, list(now)))
            now = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(now, padding, kernel, stride, strict=True)]
            numbers = f"{kernel}, {stride}, {padding}, {bias}, indice_key={keys[-1][0]!r}"
            layers.append(f"spconv.SparseConv{dims}d({c}, {made}, {numbers})")
        else:
            key, kernel, now = keys.pop()
            layers.append(f"spconv.SparseInverseConv{dims}d({c}, {made}, {kernel}, {key!r}, {bias})")
        if chance.random() < 0.4:
            layers.append(chance.choice(("nn.ReLU()", "nn.Tanh()")))
    places = prod(shape) * batch
    compiled = chance.random() < 0.15
    lines = [
        f"net = spconv.SparseSequential({', '.join(layers)}).to(torch.{dtype}).eval()",
        f"call = torch.compile(net, dynamic=True, {OPTIONS})" if compiled else "call = net",
    ]
    for _ in range(2):
        # In a graph every site is there: a SparseConv that leads nowhere is refused.
        count = places if compiled else chance.choice((0, 1, places // 3, places // 2, places))
        lines += [
            f"there = torch.randperm({places})[:{count}]",
            f"at = torch.stack(torch.unravel_index(there, {(batch, *shape)}), 1).int()",
            f"x = torch.randn(len(at), {channels[0]}, dtype=torch.{dtype})",
            "leaf, wide = x.clone().requires_grad_(), x.clone().requires_grad_()",
            f"y = call(spconv.SparseConvTensor(leaf, at, {shape}, {batch}))",
            f"z, to, _ = on_grids(net, wide, at, {tuple(shape)}, {batch})",
            "g = torch.linspace(-1, 1, z.numel(), dtype=torch.float64).view_as(z)",
            "found += [y.features, y.indices.long(), *torch.autograd.grad((y.features * g).sum(), (leaf, *net.parameters()))]",
            "expected += [z, to.long(), *torch.autograd.grad((z * g).sum(), (wide, *net.parameters()))]",
        ]
    return "\n".join(lines)


KINDS: dict[str, Callable[[random.Random], str]] = {
    "quantized": quantized, "masked": masked, "experts": experts, "mixtures": mixtures, "points": points, "routed": routed,
    "low-rank": lambda chance: low_rank(chance, OPTIONS), "structures": lambda chance: structures(chance, OPTIONS),
}  # fmt: skip


def make(kind: str, seed: int) -> str:
    """The program of a seed."""
    return f"{HEADER}\ntorch.manual_seed({seed})\nfound, expected = [], []\n{KINDS[kind](random.Random(seed))}\n"


def difference(kind: str, program: str) -> str | None:
    """What is wrong with a program, if anything is."""
    names: dict[str, Any] = {}
    torch._dynamo.reset()
    try:
        with collect() as collected, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(program, names)
    except Exception as failure:
        return f"raises {type(failure).__name__}: {str(failure)[:800]}"
    none = (
        kind in ("points", "routed", "structures") or "nn.Linear(1," in program
    )  # torch multiplies integers by one number in another way
    if not none and not any(decision.sparse for decision in collected.decisions):
        return f"no regions: {[decision.reason for decision in collected.decisions]}"
    least = _least(names["expected"]) if kind == "routed" else {}
    for n, (found, expected) in enumerate(zip(names["found"], names["expected"], strict=True)):
        scale = least.get(expected.shape[1:], 0.05) if found.itemsize == 2 else 0.05
        problem = _compared(found.detach(), expected.detach(), kind == "masked", scale)
        if problem:
            return f"result {n}: {problem}"
    return None


def _least(results: Sequence[Tensor]) -> dict[torch.Size, float]:
    """The magnitude of results of as many columns, of all calls: those of a few tokens and one column may all cancel."""
    found = dict[torch.Size, float]()
    for each in results:
        finite = each.detach()[each.isfinite()].abs()
        found[each.shape[1:]] = max(found.get(each.shape[1:], 0.05), float(finite.max()) if finite.numel() else 0)
    return found


def _compared(found: Tensor, expected: Tensor, sparing: bool, least: float) -> str | None:
    """What differs, for the largest magnitude or `least`; `sparing` where zeros that are not stored may keep a NaN to
    themselves."""
    if found.shape != expected.shape:
        return f"gives {list(found.shape)}, must be {list(expected.shape)}"
    if (found.isnan() & ~expected.isnan()).any() or (not sparing and not torch.equal(found.isnan(), expected.isnan())):
        return f"{int(found.isnan().sum())} are NaN, must be {int(expected.isnan().sum())}"
    tolerance = TOLERANCE.get(found.dtype, 0)
    kept = expected.isfinite()
    found, wide = (torch.where(kept, each, 0).double() for each in (found, expected))
    scale = max(float(wide.abs().max()) if wide.numel() else 0, least)
    error = float((found - wide).abs().max()) / scale if wide.numel() else 0
    return None if error <= tolerance else f"differs by {error:.3g} of {scale:.3g}"


def main() -> int:
    """The number of cases that failed, at most 100."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kind", choices=KINDS, required=True)
    options.add_argument("--count", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    given, ran, wrong = options.parse_args(), 0, 0
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        for seed in range(given.seed, given.seed + given.count):
            program = make(given.kind, seed)
            problem = difference(given.kind, program)
            ran += 1
            if problem is not None:
                wrong += 1
                print(f"# seed {seed}: {problem}".replace("\n", "\n# "), f"{program}\n", sep="\n", flush=True)
    print(f"{ran} cases of {given.kind} from {given.seed} on: {wrong} wrong")
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
