"""Contract IR of a CSR matrix of any size times a dense one, with elementwise work on the result."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.contracts import STEPS, TYPES

_CONSTANTS = {"zero": 0.0, "one": 1.0, "half": 0.5, "sqrt2": 2**0.5, "cubic": 0.044715, "sqrt2_pi": (2 / torch.pi) ** 0.5}


@dataclass(frozen=True)
class OpenProduct:
    """y = epilogue(a @ x) with a [?, ?] in CSR and x [?, ?], or [?] if `vector`; steps are those of `contracts.STEPS`."""

    element: str = "f32"
    steps: tuple[str, ...] = ()
    vector: bool = False
    widths: tuple[int, int] = (0, 0)

    @property
    def dtype(self) -> torch.dtype:
        return TYPES[self.element]

    def text(self) -> str:
        e, total = self.element, "f64" if self.element == "f64" else "f32"
        open_ = "?" if self.vector else "?x?"
        y, sums, a = f"tensor<{open_}x{e}>", f"tensor<{open_}x{total}>", f"tensor<?x?x{e}, #CSR>"
        extras = [STEPS[name].extra for name in self.steps]
        arguments = [f"%a: {a}", f"%x: {y}"]
        arguments += [f"%e{i}: {self._extra_type(kind)}" for i, kind in enumerate(extras) if kind is not None]
        sizes = "%m" if self.vector else "%m, %n"
        lines = [f"%{name} = arith.constant {value:.17e} : {e}" for name, value in _CONSTANTS.items()]
        lines += ["%three = arith.constant 3 : i64", "%c0 = arith.constant 0 : index", "%c1 = arith.constant 1 : index"]
        lines += [f"%nothing = arith.constant 0.0 : {total}", f"%m = tensor.dim %a, %c0 : {a}"]
        lines += [] if self.vector else [f"%n = tensor.dim %x, %c1 : {y}"]
        lines += [
            f"%start = tensor.empty({sizes}) : {sums}",
            f"%init = linalg.fill ins(%nothing : {total}) outs(%start : {sums}) -> {sums}",
            f"%empty = tensor.empty({sizes}) : {y}",
        ]
        dims, maps = ("i, k", ("i, k", "k", "i")) if self.vector else ("i, j, k", ("i, k", "k, j", "i, j"))
        kinds = ["parallel"] * (dims.count(",")) + ["reduction"]
        wide = "" if total == e else f"%l = arith.extf %left : {e} to {total}\n%r = arith.extf %right : {e} to {total}\n"
        left, right = ("%left", "%right") if total == e else ("%l", "%r")
        lines.append(
            f"%sums = linalg.generic {{indexing_maps = [{', '.join(f'affine_map<({dims}) -> ({m})>' for m in maps)}], "
            f"iterator_types = {str(kinds).replace(chr(39), chr(34))}}} ins(%a, %x : {a}, {y}) outs(%init : {sums}) {{\n"
            f"^bb0(%left: {e}, %right: {e}, %old: {total}):\n{wide}%product = arith.mulf {left}, {right} : {total}\n"
            f"%sum = arith.addf %old, %product : {total}\nlinalg.yield %sum : {total}\n}} -> {sums}"
        )
        value = "%sums"
        if total != e:
            lines.append(self._each("%narrow", value, sums, None, "", f"%out = arith.truncf %in : {total} to {e}"))
            value = "%narrow"
        for i, name in enumerate(self.steps):
            lines.append(self._each(f"%y{i}", value, y, extras[i], f"%e{i}", STEPS[name].body.replace(": T", f": {e}")))
            value = f"%y{i}"
        encoding = "#sparse_tensor.encoding<{map = (d0, d1) -> (d0 : dense, d1 : compressed), posWidth = %d, crdWidth = %d}>"
        body = "\n".join(lines)
        signature = f"func.func @region({', '.join(arguments)}) -> {y}"
        return f"#CSR = {encoding % self.widths}\n{signature} {{\n{body}\nreturn {value} : {y}\n}}\n"

    def extras(self, rows: int, columns: int = 1) -> list[Tensor]:
        """Tensors for the steps that read any, in eighths."""
        sizes = {"m": [columns], "tm": [rows] if self.vector else [rows, columns], "t1": [rows, 1], "": []}
        kinds = [STEPS[name].extra for name in self.steps]
        return [((torch.randn(sizes[kind]) * 8).round() / 8).to(self.dtype) for kind in kinds if kind is not None]

    def reference(self, y: Tensor, extras: Sequence[Tensor]) -> Tensor:
        """What the steps make of a product, in its type."""
        remaining = iter(extras)
        for name in self.steps:
            step = STEPS[name]
            y = step.reference(y) if step.extra is None else step.reference(y, next(remaining).to(y.dtype))
        return y

    def _extra_type(self, kind: str) -> str:
        shapes = {"m": "?x", "tm": "?x" if self.vector else "?x?x", "t1": "?x1x", "": ""}
        return f"tensor<{shapes[kind]}{self.element}>"

    def _each(self, result: str, value: str, type_: str, kind: str | None, extra: str, body: str) -> str:
        dims = "d0" if self.vector else "d0, d1"
        same, reads = f"affine_map<({dims}) -> ({dims})>", {"m": "d1", "tm": dims, "t1": "d0, 0", "": ""}
        maps = [same, *([f"affine_map<({dims}) -> ({reads[kind]})>"] if kind is not None else []), same]
        element, y = type_.rstrip(">").split("x")[-1], f"tensor<{'?' if self.vector else '?x?'}x{self.element}>"
        inputs, types = ([value, extra], [type_, self._extra_type(kind)]) if kind is not None else ([value], [type_])
        given = f"%in: {element}, " + (f"%extra: {self.element}, " if kind is not None else "")
        iterators = ", ".join(['"parallel"'] * (1 if self.vector else 2))
        return (
            f"{result} = linalg.generic {{indexing_maps = [{', '.join(maps)}], iterator_types = [{iterators}]}} "
            f"ins({', '.join(inputs)} : {', '.join(types)}) outs(%empty : {y}) {{\n^bb0({given}%old: {self.element}):\n{body}\n"
            f"linalg.yield %out : {self.element}\n}} -> {y}"
        )
