"""Emits calls into PyTorch's own OpenMP runtime, by GNU's entry points."""

from torch_mlir import ir
from torch_mlir.dialects import arith, func

_SIGNATURES = {
    "GOMP_parallel": "(!llvm.ptr, !llvm.ptr, i32, i32) -> ()",
    "omp_get_num_threads": "() -> i32",
    "omp_get_thread_num": "() -> i32",
}


def thread_number() -> ir.Value:
    """Returns this thread's number in its team; 0 outside of a team."""
    return _query("omp_get_thread_num")


def team_size() -> ir.Value:
    """Returns the number of threads in the team; 1 outside of a team."""
    return _query("omp_get_num_threads")


def run_team(function: ir.Value, context: ir.Value, threads: ir.Value) -> None:
    """Calls function(context) on `threads` threads and waits for them. Both are !llvm.ptr, `threads` is an index."""
    i32 = ir.IntegerType.get_signless(32)
    size = arith.index_cast(i32, threads)
    _call("GOMP_parallel", [function, context, size, arith.constant(i32, 0)])


def _query(name: str) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), _call(name, []).results[0])


def _call(name: str, operands: list[ir.Value]) -> func.CallOp:
    """Calls a runtime function, and declares it in the module if necessary."""
    type_ = ir.FunctionType(ir.Type.parse(_SIGNATURES[name]))
    op = ir.InsertionPoint.current.block.owner
    while op.name != "builtin.module":
        op = op.operation.parent
    body = op.operation.regions[0].blocks[0]
    if not any(isinstance(o, func.FuncOp) and o.name.value == name for o in body.operations):
        with ir.InsertionPoint.at_block_begin(body):
            func.FuncOp(name, type_, visibility="private")
    return func.CallOp(list(type_.results), ir.FlatSymbolRefAttr.get(name), operands)
