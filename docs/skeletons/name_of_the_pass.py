"""name-of-the-pass: says of each product how many bits its sums are added in.

before   %y = "kernel.spmm"(%x, %w) ({...}) {...}
after    %y = "kernel.spmm"(%x, %w) ({...}) {..., bits = 512}

Copy it to a room, such as passes/contract/, under the name of your pass. Its lit test is in CONTRIBUTING.md.
"""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.passes.loops.queries import walk


@dataclass(frozen=True)
class NameOfThePass:
    """Its options are the fields."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.spmm"):
            op.operation.attributes["bits"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), self.bits)
