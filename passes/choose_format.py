"""choose-format: gives each sparse weight of a product the encoding that its schedule wants.

before   func.func @region(%x: ..., %w: tensor<3072x768xf32, #CSR> {kernel.density = 0.1 : f64})
after    func.func @region(%x: ..., %w: tensor<3072x768xf32, #KB>)
         #KB = (d0, d1) -> (d1 floordiv 192 : dense, d0 : dense, d1 mod 192 : compressed), posWidth = 32, crdWidth = 16

The K-blocked form lists, block of columns by block, the nonzeros of every row; see `block_width`. `layout=rows` gives CSR
with 16-bit coordinates, for few tokens. The choice uses shape and density (rounded by the importer) alone, and the hints are
then dropped, so that layers of one shape share one kernel.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import func

from gossamer.dialects.errors import OptionError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import affine_maps
from gossamer.passes.forget_hints import DENSITY, ForgetHints
from gossamer.passes.queries import dims, public_functions, walk


@dataclass(frozen=True)
class ChooseFormat:
    """`layout` is "kblock" or "rows"; `columns` sets the width of a block of K, 0 chooses it by density."""

    name: ClassVar[str] = "choose-format"
    layout: str = "kblock"
    columns: int = 0

    def __post_init__(self) -> None:
        if self.layout not in ("kblock", "rows"):
            raise OptionError(f"layout of choose-format is {self.layout!r}, must be kblock or rows")

    def run(self, module: ir.Module) -> None:
        for contract in walk(module, "kernel.contract"):
            self._choose(contract.opview)
        for function in public_functions(module):
            inputs = [a.type for a in function.entry_block.arguments]
            function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, function.type.results))
        ForgetHints().run(module)

    def _choose(self, contract: Any) -> None:
        weight = contract.rhs
        maps = affine_maps(contract.indexing_maps)
        if not isinstance(weight.owner, ir.Block) or not is_linear(contract):
            return
        reduction = dims(maps[1]).index(2)
        tensor = ir.RankedTensorType(weight.type)
        if self.layout == "rows":
            chosen = by_rows(tensor.shape[reduction], reduction)
        else:
            density = _density(weight.owner.owner.opview, ir.BlockArgument(weight).arg_number)
            columns = self.columns or block_width(tensor.shape[1 - reduction], tensor.shape[reduction], density)
            chosen = k_blocked(columns, reduction)
        encoding = ir.Attribute.parse(str(chosen))
        weight.set_type(ir.RankedTensorType.get(tensor.shape, tensor.element_type, encoding))


def is_linear(contract: Any) -> bool:
    """Whether a kernel.contract is y[t, m] = sum_k x[t, k] w[m, k], the weight stored either way and sparse."""
    maps = affine_maps(contract.indexing_maps)
    x_dims, w_dims = (dims(m) for m in maps)
    x, w = (ir.RankedTensorType(v.type) for v in (contract.lhs, contract.rhs))
    if x_dims != [0, 2] or w_dims not in ([1, 2], [2, 1]):
        return False
    return x.encoding is None and w.encoding is not None and w.has_static_shape and not x.is_dynamic_dim(1)


def k_blocked(columns: int, reduction: int) -> Format:
    """K-blocked CSR of a matrix that is summed over dimension `reduction`, with 32-bit positions, 16-bit coordinates."""
    blocked = Format.kblock(columns)
    return blocked if reduction == 1 else blocked.permuted((1, 0))


def by_rows(size: int, reduction: int) -> Format:
    """CSR (CSC if the matrix is summed over dimension 0, of `size` elements) with coordinates as narrow as they can be."""
    return (Format.CSR if reduction == 1 else Format.CSC).with_widths(32, 16 if size <= 1 << 16 else 32)


def block_width(rows: int, size: int, density: float) -> int:
    """Columns of a block of a weight with `rows` rows, summed over `size`.

    Under a block lies a panel of x of 256 bytes a column: 192 columns stay in the first-level cache. But the sums of a
    row are loaded and stored once a block, which pays for many sparse rows in wider blocks.
    """
    widest = 384 if density <= 0.15 and rows >= 768 else 192
    blocks = -(-size // widest)
    return max(16, -(-size // (16 * blocks)) * 16)


def _density(function: func.FuncOp, argument: int) -> float:
    if "arg_attrs" not in function.attributes:
        return 0.1
    attributes = ir.DictAttr(ir.ArrayAttr(function.attributes["arg_attrs"])[argument])
    return ir.FloatAttr(attributes[DENSITY]).value if DENSITY in attributes else 0.1
