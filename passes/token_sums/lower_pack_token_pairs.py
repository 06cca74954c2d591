"""lower-pack-token-pairs: lowers a `kernel.pack_token_pairs` to loops that interleave every two tokens.

before   %p = "kernel.pack_token_pairs"(%x) : (tensor<?x?xbf16>) -> tensor<?x?x64xbf16>
after    scf.parallel (%part) = ...                            // panels of 32 features
           for each panel i of the part, each pair of tokens t
             interleave a line of each token, into p[i, t, :]         // a token past the last one is 0

Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import index, interleaved, loop, mask_of, parallel, vector_of, zeros


@dataclass(frozen=True)
class LowerPackTokenPairs:
    """Lower packing of pairs to shuffles."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.pack_token_pairs"):
            with op.location:
                _lower(op)


def _lower(op: ir.Operation) -> None:
    storage, x = storage_of(op), buffer_of(op.operands[0])
    packed = ir.MemRefType(storage.output.type)
    width = packed.shape[2] // 2
    line = vector_of(width, packed.element_type)
    with ir.InsertionPoint(op):
        tokens = memref.dim(x, index(0))
        panels, pairs = (memref.dim(storage.output, index(dim)) for dim in (0, 1))
        parts = parts_of(panels, pairs, storage.threads)
        with parallel(parts) as part:
            begin, end = ends_of(panels, part, parts)
            with loop(begin, end, index(1)) as each_panel:
                panel = each_panel.induction_variable
                first = arith.muli(panel, index(width))
                with loop(index(0), pairs, index(1)) as each_pair:
                    pair = each_pair.induction_variable
                    token = arith.muli(pair, index(2))
                    even = vector.load(line, x, [token, first])
                    odd = arith.addi(token, index(1))
                    there = arith.cmpi(arith.CmpIPredicate.ult, odd, tokens)
                    mask = mask_of(width, arith.select(there, index(width), index(0)))
                    at = [arith.select(there, odd, token), first]
                    halves = interleaved(even, vector.maskedload(line, x, at, mask, zeros(line)), 1)
                    for half, values in enumerate(halves):
                        vector.store(values, storage.output, [panel, pair, index(half * width)])
    storage.erase()
