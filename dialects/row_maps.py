"""The ops of the kernel dialect for matrices whose entries are given by bit maps: `kernel.spread_mapped`,
`kernel.collect_mapped` and `kernel.put_mapped`.

A map has a bit for each element, the lowest first. A word has as many bits as 64 bytes have elements: i16 for f32, i8 for f64.
Each row begins with a new word.
"""

from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp

_ENTRIES = "positions: i[rows+1], map: i[rows words]"


class SpreadMappedOp(KernelOp, name="spread_mapped", traits=[ext.Pure]):
    """dense[r, c] = the next value of row r if its bit is set, else 0. The values of row r begin at positions[r]."""

    lowering = "lower-mapped-rows"
    takes = f"{_ENTRIES}, values: T[entries]"
    gives = "dense: T[rows columns]"


class CollectMappedOp(KernelOp, name="collect_mapped", traits=[ext.Pure]):
    """The values of the elements whose bit is set, and for each thread the number of nonzeros in its rows without a bit."""

    lowering = "lower-mapped-rows"
    takes = f"{_ENTRIES}, dense: T[rows columns]"
    gives = "values: T[entries], others: i64[threads]"


class PutMappedOp(KernelOp, name="put_mapped", traits=[ext.Pure]):
    """Like kernel.spread_mapped, but the memory of elements without a bit stays as it is."""

    lowering = "lower-mapped-rows"
    takes = f"{_ENTRIES}, values: T[entries]"
    gives = "dense: T[rows columns]"
