"""forget-hints: drops the hints that the importer gave a region for `choose-format`, in pipelines without that pass.

before   func.func @region(%w: tensor<3072x768xf32, #CSR> {kernel.density = 0.1 : f64}) attributes {kernel.tokens = 128 : i64}
after    func.func @region(%w: tensor<3072x768xf32, #CSR>)

Without the hints, regions that differ only in density have the same text and share a kernel.
"""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.passes.loops.queries import public_functions

TOKENS = "kernel.tokens"  # function attribute: the number of rows that x is expected to have


@dataclass(frozen=True)
class ForgetHints:
    """Remove the attributes of the arguments and `kernel.tokens`."""

    def run(self, module: ir.Module) -> None:
        for function in public_functions(module):
            for attribute in ("arg_attrs", TOKENS):
                if attribute in function.attributes:
                    del function.attributes[attribute]
