"""Imports a region to contract IR: linalg on tensors, with a sparse encoding on the weight's type.

    (x [T, 768], w [3072, 768], e0 [3072]): mm, add, relu      →
    func.func @region(%arg0: tensor<?x768xf32>, %arg1: tensor<3072x768xf32, #CSR> {kernel.density = 0.1 : f64},
                      %arg2: tensor<3072xf32>) -> tensor<?x3072xf32> attributes {kernel.tokens = 128 : i64}

torch-mlir does the lowering. CSR means only "sparse by rows" here. The passes choose the storage.
"""

from typing import Any

import torch
from torch import fx
from torch_mlir import ir
from torch_mlir.dialects import torch as torch_dialect
from torch_mlir.extras.fx_importer import ContextCache, FxImporter
from torch_mlir.fx import stateless_fx_import

from gossamer.backend.regions.matrix_functions import with_values
from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.window import Window
from gossamer.passes.contract.hints import hints
from gossamer.passes.framework.family import Matrix
from gossamer.passes.framework.origins import printed

WEIGHT = 1
"""The index of the weight among the arguments of a region."""


def import_region(
    body: fx.GraphModule, matrix: Matrix, tokens: int | None, window: Window | None = None, depthwise: bool = False
) -> str:
    """Returns the contract IR of a region, as text.

    body       takes (x, w, *extras) as matrices (matrix_functions.py)
    matrix     the weight; attributes note the hints about it
    tokens     the expected number of rows of x
    window     for convolutions: the window that slides over images, which take the place of matrices
    depthwise  whether the window slides over each channel separately

    Raises CompileError if torch-mlir refuses the graph.
    """
    module = import_body(body, WEIGHT)
    function = next(op for op in module.body.operations if op.operation.name == "func.func")
    with module.context, ir.Location.unknown():
        arguments: list[ir.Attribute] = [ir.DictAttr.get({}) for _ in function.operation.regions[0].blocks[0].arguments]
        arguments[WEIGHT] = hints(matrix)
        function.attributes["arg_attrs"] = ir.ArrayAttr.get(arguments)
        if tokens is not None:
            function.attributes["kernel.tokens"] = attribute(tokens)
        if window is not None:
            function.attributes["kernel.window"] = attribute(tuple(window.numbers))
        if depthwise:
            function.attributes["kernel.depthwise"] = ir.UnitAttr.get()
    return printed(module)


def attribute(value: Any) -> ir.Attribute:
    """Returns a Python number, or several, as an attribute in the current context."""
    if isinstance(value, tuple):
        return ir.ArrayAttr.get([attribute(each) for each in value])
    if isinstance(value, float):
        return ir.FloatAttr.get(ir.F64Type.get(), value)
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(1 if isinstance(value, bool) else 64), value)


def import_body(body: fx.GraphModule, weight: int | None, format: Format = Format.CSR) -> ir.Module:
    """Imports a body as a function @region, whose argument with index `weight` has this format. Raises CompileError."""
    try:
        placeholders = [n for n in with_values(body).graph.nodes if n.op == "placeholder"]
    except Exception as error:
        raise CompileError(f"torch refuses a region: {_first_line(error)}\n{body.code}") from error
    _number_lines(body)
    context = ir.Context()
    torch_dialect.register_dialect(context)
    importer = FxImporter(context=context)
    if weight is not None:
        sparse = placeholders[weight].meta["val"]
        importer._cc = _EncodedTypes(context, sparse, format, py_attr_tracker=importer._py_attr_tracker)
    try:
        module = stateless_fx_import(body, output_type="linalg-on-tensors", fx_importer=importer, model_name="region")
    except Exception as error:
        raise CompileError(f"import of a region by torch-mlir failed: {_first_line(error)}\n{body.code}") from error
    _drop_size_checks(module)
    return module


def _number_lines(body: fx.GraphModule) -> None:
    """Adds metadata so that torch-mlir's locations are lines of `body.code`."""
    lines = {line.split(" = ")[0].strip(): number for number, line in enumerate(body.code.strip().split("\n"), 1)}
    for node in body.graph.nodes:
        if node.op == "call_function" and node.name in lines:
            node.meta["stack_trace"] = f'File "-", line {lines[node.name]}, in region'


class _EncodedTypes(ContextCache):
    """Gives one tensor of the graph a sparse type."""

    __slots__ = ("_format", "_sparse")

    def __init__(self, context: ir.Context, sparse: torch.Tensor, format: Format, **kwargs: Any) -> None:
        super().__init__(context, **kwargs)
        self._sparse, self._format = sparse, format

    def get_vtensor_type(
        self, shape: torch.Size, dtype: torch.dtype, *, val: torch.Tensor | None = None, mutable: bool = False
    ) -> ir.Type:
        if val is not self._sparse:
            return super().get_vtensor_type(shape, dtype, val=val, mutable=mutable)
        element = self.dtype_to_type(dtype)
        text = f"!torch.vtensor<[{self.format_asm_shape(shape)}],{element},{self._format}>"
        return ir.Type.parse(text, context=self._c)


def _drop_size_checks(module: ir.Module) -> None:
    """Removes torch-mlir's run-time checks that sizes of broadcast operands agree. In regions they always agree."""
    checks: list[ir.Operation] = []

    def collect(op: ir.Operation) -> ir.WalkResult:
        if op.name == "cf.assert":
            checks.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    for check in checks:
        check.erase()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[0] if lines else type(error).__name__)
