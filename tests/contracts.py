"""Regions as contract IR, in the words of torch-mlir's importer, and what they compute."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}

_CONSTANTS = {"zero": 0.0, "one": 1.0, "half": 0.5, "sqrt2": 2**0.5, "cubic": 0.044715, "sqrt2_pi": (2 / torch.pi) ** 0.5}


@dataclass(frozen=True)
class Step:
    """An elementwise operation on the result: its scalar ops (from %in and %extra to %out), and what they compute.

    `extra` is the shape of the tensor that it reads: "m", "tm", "t1", "" for a single number, None for none.
    """

    body: str
    reference: Callable[..., Tensor]
    extra: str | None = None


STEPS = {
    "bias": Step("%out = arith.addf %in, %extra : T", lambda y, e: y + e, "m"),
    "residual": Step("%out = arith.addf %in, %extra : T", lambda y, e: y + e, "tm"),
    "scale": Step("%out = arith.mulf %in, %extra : T", lambda y, e: y * e, ""),
    "token_scale": Step("%out = arith.mulf %in, %extra : T", lambda y, e: y * e, "t1"),
    "relu": Step("%0 = arith.cmpf ugt, %in, %zero : T\n%out = arith.select %0, %in, %zero : T", torch.relu),
    "relu_backward": Step(
        "%0 = arith.cmpf ogt, %in, %zero : T\n%out = arith.select %0, %extra, %zero : T",
        lambda y, e: torch.where(y > 0, e, 0),
        "tm",
    ),
    "gelu": Step(
        "%0 = arith.divf %in, %sqrt2 : T\n%1 = math.erf %0 : T\n%2 = arith.addf %1, %one : T\n"
        "%3 = arith.mulf %2, %half : T\n%out = arith.mulf %in, %3 : T",
        F.gelu,
    ),
    "gelu_tanh": Step(
        "%0 = math.fpowi %in, %three : T, i64\n%1 = arith.mulf %0, %cubic : T\n%2 = arith.addf %in, %1 : T\n"
        "%3 = arith.mulf %2, %sqrt2_pi : T\n%4 = math.tanh %3 : T\n%5 = arith.addf %4, %one : T\n"
        "%6 = arith.mulf %5, %half : T\n%out = arith.mulf %in, %6 : T",
        lambda y: F.gelu(y, approximate="tanh"),
    ),
    "silu": Step(
        "%0 = arith.negf %in : T\n%1 = math.exp %0 : T\n%2 = arith.addf %1, %one : T\n%3 = arith.divf %one, %2 : T\n"
        "%out = arith.mulf %3, %in : T",
        F.silu,
    ),
    "gated": Step(
        "%0 = arith.negf %in : T\n%1 = math.exp %0 : T\n%2 = arith.addf %1, %one : T\n%3 = arith.divf %one, %2 : T\n"
        "%out = arith.mulf %extra, %3 : T",
        lambda y, e: e * torch.sigmoid(y),
        "tm",
    ),
}


EPILOGUES = [("bias", "relu"), ("residual", "gelu_tanh"), ("token_scale", "silu"), ("scale", "gated"), ("relu_backward",)]
"""Between them all steps but one, which other regions have."""


@dataclass(frozen=True)
class Region:
    """y = epilogue(x @ w.T) with x [T, k] and a sparse w, stored as [m, k] or, if `transposed`, as [k, m].

    `density`, `tokens` and `block`, of the [m, k] matrix, are hints.
    """

    m: int
    k: int
    element: str = "f32"
    epilogue: tuple[str, ...] = ()
    transposed: bool = False
    density: float | None = None
    tokens: int | None = None
    block: tuple[int, int] | None = None

    @property
    def steps(self) -> list[Step]:
        return [STEPS[name] for name in self.epilogue]

    @property
    def dtype(self) -> torch.dtype:
        return TYPES[self.element]

    def text(self) -> str:
        """The region's contract IR."""
        e, total = self.element, "f64" if self.element == "f64" else "f32"
        x, xt = f"tensor<?x{self.k}x{e}>", f"tensor<{self.k}x{self.m}x{e}>"
        w = f"tensor<{self.k}x{self.m}x{e}, #CSR>" if self.transposed else f"tensor<{self.m}x{self.k}x{e}, #CSR>"
        y, sums = f"tensor<?x{self.m}x{e}>", f"tensor<?x{self.m}x{total}>"
        hints = [f"kernel.density = {self.density:e} : f64"] if self.density is not None else []
        hints += [f"kernel.block = [{self.block[0]} : i64, {self.block[1]} : i64]"] if self.block is not None else []
        hint = f" {{{', '.join(hints)}}}" if hints else ""
        tokens = f" attributes {{kernel.tokens = {self.tokens} : i64}}" if self.tokens is not None else ""
        extras = [self._extra_type(s) for s in self.steps]
        arguments = [f"%x: {x}", f"%w: {w}{hint}", *(f"%e{i}: {t}" for i, t in enumerate(extras) if t)]
        lines = [f"%{name} = arith.constant {value:.17e} : {e}" for name, value in _CONSTANTS.items()]
        lines += [
            "%three = arith.constant 3 : i64",
            "%c0 = arith.constant 0 : index",
            f"%nothing = arith.constant 0.0 : {total}",
            f"%tokens = tensor.dim %x, %c0 : {x}",
            f"%start = tensor.empty(%tokens) : {sums}",
            f"%init = linalg.fill ins(%nothing : {total}) outs(%start : {sums}) -> {sums}",
        ]
        factor, factor_type = "%w", w
        if not self.transposed:
            factor, factor_type = "%wt", xt
            lines += [
                f"%wt_start = tensor.empty() : {xt}",
                f"%wt = linalg.transpose ins(%w : {w}) outs(%wt_start : {xt}) permutation = [1, 0]",
            ]
        product = f"linalg.matmul ins(%x, {factor} : {x}, {factor_type}) outs(%init : {sums}) -> {sums}"
        lines += [f"%sums = {product}", f"%empty = tensor.empty(%tokens) : {y}"]
        value = "%sums"
        if total != e:
            lines.append(self._generic("%narrow", "%sums", sums, "", f"%out = arith.truncf %in : {total} to {e}"))
            value = "%narrow"
        for i, step in enumerate(self.steps):
            reads = f"%e{i}" if step.extra is not None else ""
            lines.append(self._generic(f"%y{i}", value, y, reads, step.body.replace(": T", f": {e}"), extras[i], step.extra))
            value = f"%y{i}"
        body = "\n".join(lines)
        return (
            f"#CSR = #sparse_tensor.encoding<{{ map = (d0, d1) -> (d0 : dense, d1 : compressed) }}>\n"
            f"func.func @region({', '.join(arguments)}) -> {y}{tokens} {{\n{body}\nreturn {value} : {y}\n}}\n"
        )

    def _extra_type(self, step: Step) -> str:
        shapes = {"m": f"{self.m}x", "tm": f"?x{self.m}x", "t1": "?x1x", "": ""}
        return f"tensor<{shapes[step.extra]}{self.element}>" if step.extra is not None else ""

    def _generic(
        self, result: str, value: str, type_: str, extra: str, body: str, extra_type: str = "", shape: str | None = None
    ) -> str:
        """An elementwise linalg.generic; the last line of `body` defines %out."""
        maps = {"m": "(d0, d1) -> (d1)", "tm": "(d0, d1) -> (d0, d1)", "t1": "(d0, d1) -> (d0, 0)", "": "(d0, d1) -> ()"}
        same, y = "affine_map<(d0, d1) -> (d0, d1)>", f"tensor<?x{self.m}x{self.element}>"
        element = type_.rstrip(">").split("x")[-1]
        reads = f", affine_map<{maps[shape]}>" if shape is not None else ""
        block = f"%in: {element}, " + (f"%extra: {self.element}, " if extra else "") + f"%old: {self.element}"
        inputs, types = (f"{value}, {extra}", f"{type_}, {extra_type}") if extra else (value, type_)
        return (
            f'{result} = linalg.generic {{indexing_maps = [{same}{reads}, {same}], iterator_types = ["parallel", "parallel"]}}'
            f" ins({inputs} : {types}) outs(%empty : {y}) {{\n"
            f"^bb0({block}):\n{body}\nlinalg.yield %out : {self.element}\n}} -> {y}"
        )

    def operands(self, tokens: int, density: float = 0.3) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Random x, w as it is stored, and the extra operands: whole eighths, so that all sums are exact in f32."""
        r, c = self.block or (1, 1)
        blocks = torch.rand(-(-self.m // r), -(-self.k // c)) < density
        mask = blocks.repeat_interleave(r, 0).repeat_interleave(c, 1)[: self.m, : self.k]
        w = _eighths(self.m, self.k) * mask
        sizes = {"m": (self.m,), "tm": (tokens, self.m), "t1": (tokens, 1), "": ()}
        extras = [_eighths(*sizes[s.extra]).to(self.dtype) for s in self.steps if s.extra is not None]
        stored = (w.t() if self.transposed else w).contiguous()
        return _eighths(tokens, self.k).to(self.dtype), stored.to(self.dtype), extras

    def reference(self, x: Tensor, w: Tensor, extras: list[Tensor]) -> Tensor:
        """What the region computes, in f64."""
        y = x.double() @ (w if self.transposed else w.t()).double()
        remaining = iter(extras)
        for step in self.steps:
            y = step.reference(y, *([next(remaining).double()] if step.extra is not None else []))
        return y


def _eighths(*size: int) -> Tensor:
    return (torch.randn(size) * 8).round() / 8


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of the type of `actual`, in which sums and a short epilogue were computed."""
    unit = {torch.float32: 1e-5, torch.float64: 1e-13, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[actual.dtype]
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual.double(), expected, rtol=unit, atol=unit * max(scale, 1e-3))
