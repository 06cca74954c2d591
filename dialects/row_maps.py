"""The ops of the kernel dialect for matrices whose entries are told by maps: `kernel.spread_mapped`,
`kernel.collect_mapped` and `kernel.put_mapped`.

A map has a bit for each element, the lowest first, in words of as many bits as 64 bytes have elements: i16 for f32, i8 for f64.
Rows are whole words.
"""

from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp

_ENTRIES = "positions: i[rows+1], map: i[rows words]"


class SpreadMappedOp(KernelOp, name="spread_mapped", traits=[ext.Pure]):
    """dense[r, c] = the next value of row r where its map has a bit, 0 elsewhere. The values of row r begin at positions[r]."""

    lowering = "lower-mapped-rows"
    takes = f"{_ENTRIES}, values: T[entries]"
    gives = "dense: T[rows columns]"


class CollectMappedOp(KernelOp, name="collect_mapped", traits=[ext.Pure]):
    """The values of such entries; and how many nonzeros of a thread's rows are no entries, added up over threads."""

    lowering = "lower-mapped-rows"
    takes = f"{_ENTRIES}, dense: T[rows columns]"
    gives = "values: T[entries], others: i64[threads]"


class PutMappedOp(KernelOp, name="put_mapped", traits=[ext.Pure]):
    """As kernel.spread_mapped, but the memory of elements without a bit stays as it is."""

    lowering = "lower-mapped-rows"
    takes = f"{_ENTRIES}, values: T[entries]"
    gives = "dense: T[rows columns]"
