"""The ops of the kernel dialect for sums over tokens, as in gradients of weights, at the entries of a sparse matrix.

`kernel.pack_tokens` and `kernel.sample_tokens` compute such sums; `kernel.pack_token_pairs` and `kernel.sample_blocks` do for
blocks of bf16. `kernel.spread`, `kernel.collect`, `kernel.collect_counted` and `kernel.put` convert to and from dense matrices.

Packed tokens lie in tiles, [tiles, features, width]: for each feature, the tokens of a tile are contiguous; zeros follow the
last token. Packed pairs of tokens lie in panels of features, [panels, pairs, 2 width]: two tokens of each feature side by side.
"""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp, verified

_PLACES = "positions: i[rows+1], coordinates: i[entries]"


def _pairs_problem(op: Any) -> str | None:
    width = ir.RankedTensorType(op.operation.operands[-1].type if len(op.operation.operands) > 1 else op.result.type).shape[2]
    return None if width in (32, 64) else f"has {width // 2} features in a panel, must be 16 or 32"


class PackTokensOp(KernelOp, name="pack_tokens", traits=[ext.Pure]):
    """packed[i, n, t] = x[i * width + t, n], 0 for tokens past the last one."""

    takes = "x: f[tokens features]"
    gives = "result: w[tiles features width!]"


class SampleTokensOp(KernelOp, name="sample_tokens", traits=[ext.Pure]):
    """values[p] = the sum over tiles i and tokens t of x[i, r, t] y[i, c, t], for the entries p = (r, c) of a matrix in CSR."""

    takes = f"{_PLACES}, x: W[tiles rows width!], y: W[tiles columns width!]"
    gives = "result: W[entries]"


class SamplePlacesOp(KernelOp, name="sample_places", traits=[ext.Pure]):
    """values[p] = the sum over tiles i and tokens t of x[i, r, t] y[i, c + t], for the entries p of each row r. The coordinate
    c of an entry is a place in y."""

    lowering = "lower-sample-tokens"
    takes = f"{_PLACES}, x: W[tiles rows tokens], y: W[tiles elements]"
    gives = "result: W[entries]"


class SpreadOp(KernelOp, name="spread", traits=[ext.Pure]):
    """dense[r, c] = values[p] for the entries p = (r, c) of a matrix in CSR, 0 elsewhere. Each thread has a scratch `row`."""

    takes = f"{_PLACES}, values: T[entries]"
    gives = "dense: T[rows columns], row: T[threads columns]"


class CollectOp(KernelOp, name="collect", traits=[ext.Pure]):
    """values[p] = dense[r, c] for the entries p = (r, c) of a matrix in CSR."""

    takes = f"{_PLACES}, dense: T[rows columns]"
    gives = "values: T[entries]"


class CollectCountedOp(KernelOp, name="collect_counted", traits=[ext.Pure]):
    """Like kernel.collect, but also gives for each thread the number of nonzeros in its rows that are no entries."""

    lowering = "lower-collect"
    takes = f"{_PLACES}, dense: T[rows columns]"
    gives = "values: T[entries], others: i64[threads]"


class PutOp(KernelOp, name="put", traits=[ext.Pure]):
    """dense[r, c] = values[p] for the entries p = (r, c) of a matrix in CSR. Other elements of the memory stay as they are."""

    takes = f"{_PLACES}, values: T[entries]"
    gives = "dense: T[rows columns]"


class PackTokenPairsOp(KernelOp, name="pack_token_pairs", traits=[ext.Pure]):
    """packed[i, t, 2 n + h] = x[2 t + h, i * width + n], 0 for a token past the last one; features in whole panels."""

    takes = "x: bf16[tokens features]"
    gives = "result: bf16[panels pairs twice!]"

    verify_invariants = verified(_pairs_problem)


class SampleBlocksOp(KernelOp, name="sample_blocks", traits=[ext.Pure]):
    """values[p] = the sum over tokens of x[r] y[c], for the entries p = (r, c) of a matrix in CSR that has only whole blocks.

    positions, coordinates   the matrix of blocks in CSR

    The values of a row of blocks are in the order of CSR: row by row, and in a row block by block.
    """

    takes = "positions: i[rows+1], coordinates: i[blocks], x: bf16[rows pairs twice!], y: bf16[columns pairs twice!]"
    gives = "result: bf16[entries]"

    verify_invariants = verified(_pairs_problem)
