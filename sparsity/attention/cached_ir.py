"""Contract IR of attention of a few queries over a cache: `kernel.attend_cached` and `kernel.attend_appended`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch_mlir import ir
from torch_mlir.dialects import func

from gossamer.dialects.attention import Step
from gossamer.dialects.cached_attention import SIZES, STRIDED, AttendAppendedOp, AttendCachedOp
from gossamer.passes.framework.context import building
from gossamer.runtime.elements import FLOATS


@dataclass(frozen=True)
class Heads:
    """What a kernel is made for: heads of `size` elements of a type, `queries` of them for each, and `group` of them share the
    keys and values of one; the steps of the score, and the type of a mask."""

    size: int
    group: int
    queries: int
    dtype: torch.dtype
    score: tuple[Step, ...]
    mask: torch.dtype | None


def contract_of(heads: Heads, appends: bool) -> str:
    """(q, k, v, mask if there is one, sizes...) → out, or
    (q, k, v, new_k, new_v, mask if there is one, sizes...) → (out, all_k, all_v) where it `appends`
    """
    op = AttendAppendedOp if appends else AttendCachedOp
    with building():
        module = ir.Module.create()
        memory = _memory(heads.dtype)
        names = ["q", "k", "v", *(["new_k", "new_v"] if appends else [])]
        results = ["out", *(["all_k", "all_v"] if appends else [])]
        count = len(SIZES) + 3 * len(STRIDED[f"kernel.{op.OPERATION_NAME.removeprefix('kernel.')}"])
        masks = [] if heads.mask is None else [_memory(heads.mask)]
        types = [*[memory] * len(names), *masks, *[ir.IndexType.get()] * count]
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("region", (types, [memory] * len(results)))
        with ir.InsertionPoint(function.add_entry_block()):
            arguments = list(function.entry_block.arguments)
            i64 = ir.IntegerType.get_signless(64)
            numbers = {"head_size": heads.size, "group": heads.group, "queries": heads.queries}
            made = op(
                **dict(zip(names, arguments, strict=False)),
                mask=arguments[len(names)] if masks else None,
                sizes=arguments[-count:],
                **{name: ir.IntegerAttr.get(i64, number) for name, number in numbers.items()},
                score=_steps(heads.score),
                **dict.fromkeys(results, memory),
            )
            func.ReturnOp([getattr(made, name) for name in results])
        module.operation.verify()
        return str(module)


def _steps(score: Sequence[Step]) -> ir.ArrayAttr:
    f64 = ir.F64Type.get()
    return ir.ArrayAttr.get([ir.StringAttr.get(s) if isinstance(s, str) else ir.FloatAttr.get(f64, s) for s in score])


def _memory(dtype: torch.dtype) -> ir.RankedTensorType:
    return ir.RankedTensorType.get([ir.ShapedType.get_dynamic_size()], ir.Type.parse(FLOATS[dtype]))
