"""Imports a chain as contract IR: a private function for each stage, and @region, which calls them.

    func.func private @stage0(%arg0: tensor<?x384xf32>, %arg1: tensor<1536x384xf32, #CSR>, ...) -> tensor<?x1536xf32>
    func.func @region(%x: tensor<?x384xf32>, %up: ..., %down: ..., %bias: ..., %length: index) -> tensor<?x384xf32> {
      %0 = call @stage0(%x, %up, %bias)
      %1 = call @stage1(%0, %down, %x)
      %2 = "kernel.attend"(%1, ...)

The arguments of @region are the first input, the weights, the other inputs and, with attention, the length of a sequence.
Attention is not expressed in linalg: it becomes `kernel.attend`, norms and rotations of heads become `kernel.normalize` and
`kernel.rotate`, which passes/chains lowers. Matrices whose rows come position by position go through `kernel.regroup`.
build_chain.py calls this and compiles the result.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx
from torch_mlir import ir
from torch_mlir.dialects import func

from gossamer.backend.chains.attention import Attention
from gossamer.backend.chains.find_chains import Chain, Stage
from gossamer.backend.regions.importer import WEIGHT, attribute, import_body
from gossamer.backend.regions.matrix_functions import signature
from gossamer.dialects.heads import AttendOp, NormalizeOp, RegroupOp, RotateOp
from gossamer.passes.contract.hints import hints
from gossamer.passes.framework.context import building
from gossamer.passes.framework.family import Matrix
from gossamer.passes.framework.origins import line_location, moved, printed
from gossamer.runtime.elements import FLOATS

Scheduled = tuple[Matrix, str | None]
"""A weight, and the name of the schedule that the chain uses for it."""


def import_chain(chain: Chain, weights: Sequence[Scheduled], tokens: int | None) -> str:
    """Returns the contract IR of a chain, as text. Raises CompileError if torch-mlir refuses a stage.

    `weights` are in the order of its contractions, and become hints on arguments. `tokens` is the expected number of rows.
    """
    bodies = {signature(s.body): (s.body, s.contraction) for s in chain.stages if s.body is not None}
    modules = {key: import_body(body, None if product is None else WEIGHT) for key, (body, product) in bodies.items()}
    texts = {key: module.operation.get_asm(enable_debug_info=True) for key, module in modules.items()}
    lines = [line for line, _ in _shown(chain)]
    with building():
        module = ir.Module.create()
        functions = [_function(module, n, s, texts, line) for (n, s), line in zip(enumerate(chain.stages), lines, strict=True)]
        _compose(module, chain, functions, weights, tokens, lines)
        return printed(module)


def chain_text(chain: Chain, weights: Sequence[str]) -> str:
    """Returns the stages of a chain as Python text, with names of weights. Locations in its contract IR are lines of it."""
    return "\n".join(text for _, text in _shown(chain, weights))


def _shown(chain: Chain, weights: Sequence[str] = ()) -> Iterator[tuple[int, str]]:
    """Yields the text of each stage, and before it the line at which the text begins, counted from 1."""
    named = iter(weights)
    names = {i.node: f"input{n}" for n, i in enumerate(chain.inputs)}
    names |= {s.output: f"y{n}" for n, s in enumerate(chain.stages)}
    line = 1
    for number, stage in enumerate(chain.stages):
        given = ", ".join(names[operand.node] for operand in stage.operands)
        text = "" if stage.body is None else stage.body.code.strip().replace("def forward", f"def stage{number}", 1) + "\n"
        called = f"stage{number}" if stage.step is None else stage.step.operation
        weight = next(named, "") if stage.contraction is not None else ""
        text += f"y{number} = {called}({given}){weight and f'  # {weight}'}\n"
        yield line, text
        line += text.count("\n") + 1


def _function(module: ir.Module, number: int, stage: Stage, texts: dict[str, str], line: int) -> func.FuncOp | None:
    """Adds the function of a stage to the module and returns it; None for a `step`. Its text begins at `line`."""
    if stage.body is None:
        return None
    parsed = ir.Module.parse(texts[signature(stage.body)])
    function = next(op for op in parsed.body.operations if isinstance(op, func.FuncOp))
    clone = function.operation.clone(ir.InsertionPoint(module.body))
    clone.attributes["sym_name"] = ir.StringAttr.get(f"stage{number}")
    clone.attributes["sym_visibility"] = ir.StringAttr.get("private")
    moved(clone, line - 1)
    return clone.opview if hasattr(clone, "opview") else clone


def _compose(
    module: ir.Module,
    chain: Chain,
    functions: list[func.FuncOp | None],
    scheduled: Sequence[Scheduled],
    tokens: int | None,
    lines: Sequence[int],
) -> None:
    """Adds @region, which calls the functions of the stages."""
    weights = [
        function.type.inputs[WEIGHT]
        for stage, function in zip(chain.stages, functions, strict=True)
        if stage.contraction is not None and function is not None
    ]
    first, *others = (_type(i.node, i.kind) for i in chain.inputs)
    types = [first, *weights, *others, *([ir.IndexType.get()] if chain.attention is not None else [])]
    notes = [ir.DictAttr.get({}) for _ in types]
    notes[1 : 1 + len(scheduled)] = [hints(matrix, schedule) for matrix, schedule in scheduled]
    with ir.InsertionPoint(module.body):
        region = func.FuncOp("region", (types, [_result_type(stage) for stage in chain.results]))
    region.attributes["arg_attrs"] = ir.ArrayAttr.get(notes)
    if tokens is not None:
        region.attributes["kernel.tokens"] = attribute(tokens)
    with ir.InsertionPoint(region.add_entry_block()):
        x, *arguments = region.entry_block.arguments
        stored = iter(arguments[: len(weights)])
        nodes = [i.node for i in chain.inputs]
        values: dict[fx.Node, ir.Value] = dict(zip(nodes, [x, *arguments[len(weights) :]], strict=False))
        values.update({n: _regrouped(values[n], arguments[-1], False) for n in nodes if n in chain.by_position})
        for stage, function, line in zip(chain.stages, functions, lines, strict=True):
            operands = [values[o.node] for o in stage.operands]
            if function is None:
                with line_location(line):
                    values[stage.output] = _step(stage, operands, arguments[-1])
                continue
            if stage.contraction is not None:
                operands.insert(WEIGHT, next(stored))
            values[stage.output] = func.CallOp(function, operands).results[0]
        outputs = [(values[node], node in chain.by_position) for node in chain.outputs]
        func.ReturnOp([_regrouped(y, arguments[-1], True) if turned else y for y, turned in outputs])


def _step(stage: Stage, operands: list[ir.Value], length: ir.Value) -> ir.Value:
    """Adds the operation of attention, or of a norm or rotation of heads, and returns its result."""
    step = stage.step
    assert step is not None
    given = {name: attribute(number) for name, number in step.numbers.items()}
    if isinstance(step, Attention):
        q, k, v, *mask = operands
        return AttendOp(q, k, v, length, mask, **given, result=_result_type(stage)).result
    shape, like = [ir.ShapedType.get_dynamic_size(), step.columns], ir.RankedTensorType(operands[0].type)
    operation = NormalizeOp if step.operation == "normalize" else RotateOp
    return operation(*operands, **given, result=ir.RankedTensorType.get(shape, like.element_type)).result


def _regrouped(value: ir.Value, length: ir.Value, inverse: bool) -> ir.Value:
    return RegroupOp(value, length, inverse=attribute(inverse), result=value.type).result


def _result_type(stage: Stage) -> ir.Type:
    element = ir.Type.parse(FLOATS[stage.output.meta["val"].dtype])
    return ir.RankedTensorType.get([ir.ShapedType.get_dynamic_size(), stage.columns], element)


def _type(node: fx.Node, kind: str) -> ir.Type:
    """Returns the type of an input as @region takes it: a matrix has one row for each token, a dynamic size."""
    value: Any = node.meta["val"]
    dynamic = ir.ShapedType.get_dynamic_size()
    width = value.shape[-1] if value.dim() else 1
    shapes = {
        "scalar": [], "vector": [width], "column": [dynamic, 1], "matrix": [dynamic, width], "mask": [dynamic, dynamic],
        "position": [dynamic, width], "factor": list(value.shape),
    }  # fmt: skip
    return ir.RankedTensorType.get(shapes[kind], ir.Type.parse(FLOATS[value.dtype]))
