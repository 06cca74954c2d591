"""forget-hints: drops what the importer noted about a region for `choose-format`, where no format is chosen.

before   func.func @region(%w: tensor<3072x768xf32, #CSR> {kernel.density = 0.1 : f64}) attributes {kernel.tokens = 128 : i64}
after    func.func @region(%w: tensor<3072x768xf32, #CSR>)

Without them, regions that differ in density alone have the same text and share a kernel.
"""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.passes.loops.queries import public_functions

TOKENS = "kernel.tokens"  # function attribute: how many rows x is expected to have


@dataclass(frozen=True)
class ForgetHints:
    """Remove the attributes of the arguments and `kernel.tokens`."""

    def run(self, module: ir.Module) -> None:
        for function in public_functions(module):
            for attribute in ("arg_attrs", TOKENS):
                if attribute in function.attributes:
                    del function.attributes[attribute]
