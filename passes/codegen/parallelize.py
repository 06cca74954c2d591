"""parallelize: turns an scf.parallel into a function that PyTorch's own OpenMP team runs.

before   scf.parallel (%task) = (%c0) to (%n) step (%c1) { body(%task, %captured) }
after    store %captured into a struct on the stack
         if min(%threads, %n) > 1  GOMP_parallel(@region_team, struct, min(%threads, %n), 0)
         else                      call @region_team(struct)
         func.func private @region_team(%context: !llvm.ptr) {
           for %task = omp_get_thread_num() to %n step omp_get_num_threads()  body(%task, loaded)

The number of threads is the last argument of the enclosing function. PyTorch's libgomp is already in the process, so
torch.set_num_threads applies, and no second pool of threads competes with it.
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, func, llvm, scf

from gossamer.dialects.errors import CompileError
from gossamer.passes.loops.llvm_values import from_llvm, i64, insert, llvm_type, struct_of, to_llvm
from gossamer.passes.loops.openmp import run_team, team_size, thread_number
from gossamer.passes.loops.queries import all_ops, is_constant, walk
from gossamer.passes.loops.vectors import index, loop


@dataclass(frozen=True)
class Parallelize:
    """Outline every scf.parallel of one dimension, from 0 in steps of 1, and hand it to GOMP_parallel."""

    def run(self, module: ir.Module) -> None:
        for number, op in enumerate(walk(module, "scf.parallel")):
            _outline(op.opview, number)


def _outline(parallel: Any, number: int) -> None:
    function = _function_of(parallel.operation)
    body = parallel.region.blocks[0]
    operands = list(parallel.operation.operands)
    if len(operands) != 3 or not is_constant(operands[0], 0) or not is_constant(operands[2], 1):
        raise CompileError(f"scf.parallel at {parallel.location}: needs one dimension from 0, in steps of 1, and no results")
    high = operands[1]
    captured = list(dict.fromkeys([high, *_captured(parallel.operation)]))
    struct = struct_of([v.type for v in captured])
    pointer = ir.Type.parse("!llvm.ptr")
    name = f"{function.name.value}_team{number or ''}"
    with parallel.location:
        with ir.InsertionPoint(function):
            team = func.FuncOp(name, ([pointer], []), visibility="private")
            _fill_team(team, captured, struct, body)
        with ir.InsertionPoint(parallel):
            context = llvm.alloca(pointer, i64(1), ir.TypeAttr.get(struct))
            packed = llvm.mlir_undef(struct)
            for i, value in enumerate(captured):
                packed = insert(packed, to_llvm(value), i)
            llvm.store(packed, context)
            threads = arith.minui(function.entry_block.arguments[-1], high)
            several = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ugt, threads, index(1)), has_else=True)
            with ir.InsertionPoint(several.then_block):
                symbol = func.ConstantOp(team.type, ir.FlatSymbolRefAttr.get(name))
                run_team(from_llvm(symbol.result, pointer), context, threads)
                scf.YieldOp([])
            with ir.InsertionPoint(several.else_block):
                func.CallOp(team, [context])
                scf.YieldOp([])
    parallel.operation.erase()


def _function_of(op: ir.Operation) -> Any:
    while op.name != "func.func":
        op = op.parent
    return op.opview


def _captured(parallel: ir.Operation) -> list[ir.Value]:
    """Returns the values from outside that the body uses, in order of first use."""
    ops = all_ops(parallel)[1:]
    inside = {r for op in ops for r in op.results}
    inside |= {a for op in [parallel, *ops] for region in op.regions for block in region.blocks for a in block.arguments}
    return list(dict.fromkeys(v for op in ops for v in op.operands if v not in inside))


def _fill_team(team: func.FuncOp, captured: list[ir.Value], struct: ir.Type, body: ir.Block) -> None:
    """Moves the parallel body into a loop of the outlined function. Each of n threads takes every n-th task."""
    entry = team.add_entry_block()
    replacements: dict[ir.Value, ir.Value] = {}
    with ir.InsertionPoint(entry):
        packed = llvm.load(struct, entry.arguments[0])
        for i, value in enumerate(captured):
            element = llvm.extractvalue(llvm_type(value.type), packed, [i])
            replacements[value] = from_llvm(element, value.type)
        high = replacements[captured[0]]
        with loop(thread_number(), high, team_size()) as tasks:
            replacements[body.arguments[0]] = tasks.induction_variable
        func.ReturnOp([])
    end = tasks.body.operations[0]
    *work, _reduce = body.operations
    for op in work:
        op.operation.move_before(end.operation)
    for op in all_ops(team.operation):
        for i, operand in enumerate(op.operands):
            if operand in replacements:
                op.operands[i] = replacements[operand]
