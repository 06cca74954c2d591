"""narrow-sums: sums integers in 32 bits if their sum of 64 bits is truncated to 32 anyway.

before   "kernel.contract"(%x, %w) ({ ^bb0(%sum: i64): %0 = arith.trunci %sum : i64 to i32 ...
after    "kernel.contract"(%x, %w) ({ ^bb0(%sum: i32): ...

Sums wrap around, so the lower bits are the same. The wide sums come from torch-mlir, which sums all integers in 64 bits.
"""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.passes.loops.queries import sole_user, walk


@dataclass(frozen=True)
class NarrowSums:
    """Let each `kernel.contract` sum in the type to which its epilogue truncates."""

    def run(self, module: ir.Module) -> None:
        for contract in walk(module, "kernel.contract"):
            total = contract.regions[0].blocks[0].arguments[0]
            cut = sole_user(total)
            if cut is not None and cut.name == "arith.trunci":
                cut.results[0].replace_all_uses_with(total)
                total.set_type(cut.results[0].type)
                cut.erase()
