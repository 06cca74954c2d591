"""The kernel dialect, defined in Python on MLIR's bindings. Its ops say what a region computes and how it is scheduled.

`kernel.contract` says what is computed: a contraction of two factors and, in its region, an elementwise epilogue. The epilogue
turns each finished sum into an element of the result, or of each of several results. It reads other tensors by `kernel.read`.

    %y = "kernel.contract"(%x, %w) ({
    ^bb0(%sum: f32):
      %b = "kernel.read"(%bias) {map = affine_map<(d0, d1) -> (d1)>} : (tensor<3072xf32>) -> f32
      %0 = arith.addf %sum, %b : f32
      "kernel.yield"(%0) : (f32) -> ()
    }) {indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>, affine_map<(d0, d1, d2) -> (d1, d2)>]}
       : (tensor<?x768xf32>, tensor<3072x768xf32, #CSR>) -> tensor<?x3072xf32>

The maps of the factors have the result's dimensions, then the reduced ones. The map of a `kernel.read` has the result's.

`kernel.spmm` says how a product is computed: `schedule` names the family, and `tile` has its numbers (the tokens of a tile
first). `lanes` is the number of elements in a vector. `reduction` is the dimension of the weight that is summed over.

A chain has other ops between its products: `kernel.map` (elementwise, [T, N] or [T, 1]), `kernel.sum` and `kernel.max` (over
the rows of a matrix, to [T, 1]). Their bodies read all operands by `kernel.read`.

    %total = "kernel.sum"() ({ %0 = "kernel.read"(%x) ...; "kernel.yield"(%0) }) {size = 384} : () -> tensor<?x1xf32>

`kernel.inner` in a body is an element of a product with a dense matrix, such as that of a low rank beside a sparse weight.

heads.py has the ops of chains on heads of attention. open_ops.py and edges.py have operations on sparse tensors that are
arguments of each call.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import ext

from gossamer.dialects.signature import Given, Known, Signature


class KernelDialect(ext.Dialect, name="kernel"):
    """Operations on the level between linalg on sparse tensors and loops."""


def verified(check: Callable[[Any], str | None]) -> staticmethod:
    """Returns a verifier for `ext`. It reports operands unlike the op's declaration, or the problem that `check` finds, as a
    diagnostic at the op."""

    def verify(op: Any) -> bool:
        problem = _type_problem(op) or check(op)
        if problem:
            op.location.emit_error(f"'{op.operation.name}' {problem}")
        return problem is None

    return staticmethod(verify)


def _type_problem(op: Any) -> str | None:
    """Returns a message about the first operand or result that is not as the op declares it."""
    known: Known = {}
    for declared in (*op.signature.takes, *op.signature.gives):
        value = getattr(op, declared.name)
        for each in value if declared.many == "*" else [value]:
            if each is not None and (problem := declared.problem(_given(each.type), known)):
                return f"has {problem}"
    return None


def _given(type_: ir.Type) -> Given:
    tensor = ir.RankedTensorType(type_)
    shape = [None if tensor.is_dynamic_dim(dim) else tensor.shape[dim] for dim in range(tensor.rank)]
    return Given(str(tensor.element_type), shape, tensor.encoding is not None, lambda: str(tensor))


_OPERANDS: dict[str, Any] = {
    "": ext.Operand[Any],
    "?": ext.Operand[Any] | None,
    "*": Sequence[ext.Operand[Any]],
}
_RESULTS: dict[str, Any] = {"": ext.Result[Any], "?": ext.Result[Any] | None}


class KernelOp(KernelDialect.Operation):
    """An operation. `takes` and `gives`, in the syntax of signature.py, declare its first operands and its last results.

    An op with further conditions has its own verifier: `verify_region_invariants` if it has regions, else `verify_invariants`.
    `lowering` is the pass that lowers it for CPUs, by default "lower-" and its name. The one for GPUs begins with "lower-gpu-".
    """

    takes = gives = lowering = ""
    signature = Signature()

    def __init_subclass__(cls, *, name: str | None = None, **options: Any) -> None:
        own = cls.__dict__
        declared = Signature.parse(own.get("takes", ""), own.get("gives", ""))
        cls.signature += declared
        given = {each.name: _OPERANDS[each.many] for each in declared.takes}
        made = {each.name: _RESULTS[each.many] for each in declared.gives}
        cls.__annotations__ = {**given, **own.get("__annotations__", {}), **made}
        if name is not None and not cls.lowering:
            cls.lowering = f"lower-{name.replace('_', '-')}"
        super().__init_subclass__(name=name, **options)

    verify_invariants = verified(lambda op: None)
    verify_region_invariants = staticmethod(lambda op: True)


def affine_maps(attribute: ir.ArrayAttr) -> list[ir.AffineMap]:
    """Returns the maps of an `indexing_maps` attribute."""
    return [ir.AffineMapAttr(a).value for a in attribute]


def integer(value: int) -> ir.IntegerAttr:
    """Returns an attribute of 64 bits."""
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def integers(attribute: ir.ArrayAttr) -> list[int]:
    """Returns the numbers of an array attribute such as `tile`."""
    return [ir.IntegerAttr(a).value for a in attribute]


def epilogue_problem(op: Any) -> str | None:
    if len(op.epilogue.blocks) != 1 or len(op.epilogue.blocks[0].arguments) != 1:
        return "needs one epilogue block that takes the sum"
    return _block_problem(op, op.epilogue.blocks[0], "epilogue", list(op.operation.results))


def _body_problem(op: Any) -> str | None:
    if len(op.body.blocks) != 1 or len(op.body.blocks[0].arguments) != 0:
        return "needs one block without arguments"
    return _block_problem(op, op.body.blocks[0], "body", [op.result])


def _sum_problem(op: Any) -> str | None:
    result = ir.RankedTensorType(op.result.type)
    if result.rank != 2 or result.shape[1] != 1:
        return f"gives {result}, must be [T, 1]"
    return _body_problem(op)


def _block_problem(op: Any, block: ir.Block, name: str, given: list[ir.Value]) -> str | None:
    results = [ir.RankedTensorType(value.type) for value in given]
    operations = list(block.operations)
    if not operations or operations[-1].operation.name != "kernel.yield":
        return f"{name} must end in kernel.yield"
    yielded = list(operations[-1].operands)
    if len(yielded) != len(results):
        return f"{name} yields {len(yielded)} values for {len(results)} results"
    for value, result in zip(yielded, results, strict=True):
        if value.type != result.element_type:
            return f"{name} yields {value.type}, the result holds {result.element_type}"
        if result != results[0]:
            return f"has results {results[0]} and {result}, must be of one type"
    for inner in operations:
        if inner.operation.name == "kernel.read":
            dims = ir.AffineMapAttr(inner.attributes["map"]).value.n_dims
            if dims != results[0].rank:
                return f"{name} reads with a map over {dims} dimensions, the result has {results[0].rank}"
    return None


def _contract_problem(op: Any) -> str | None:
    factors, maps = [op.lhs, op.rhs], affine_maps(op.indexing_maps)
    if len(maps) != 2:
        return f"has {len(maps)} indexing maps for 2 factors"
    sizes: dict[int, int] = {}
    for factor, affine_map in zip(factors, maps, strict=True):
        tensor = ir.RankedTensorType(factor.type)
        if len(affine_map.results) != tensor.rank:
            return f"map {affine_map} does not fit {tensor}"
        for axis, expr in enumerate(affine_map.results):
            size, position = tensor.shape[axis], ir.AffineDimExpr(expr).position
            if size >= 0 and sizes.setdefault(position, size) != size:
                return f"contraction sizes differ: d{position} is {sizes[position]} and {size}"
    return epilogue_problem(op)


def _spmm_problem(op: Any) -> str | None:
    """Returns why x [T, K], w [M, K] (or [K, M]) and the result [T, M] do not fit a kernel.spmm, or None."""
    x, w = ir.RankedTensorType(op.x.type), ir.RankedTensorType(op.w.type)
    result = ir.RankedTensorType(op.result.type)
    if x.rank != 2 or w.rank != 2 or result.rank != 2:
        return "works on matrices"
    if w.encoding is None:
        return "needs a weight with a sparse encoding"
    reduction = ir.IntegerAttr(op.reduction).value
    if reduction not in (0, 1):
        return f"reduction is dimension {reduction} of the weight, must be 0 or 1"
    if x.shape[1] != w.shape[reduction]:
        return f"contraction sizes differ: {x.shape[1]} and {w.shape[reduction]}"
    if result.shape[1] != w.shape[1 - reduction]:
        return f"result has {result.shape[1]} columns, the weight gives {w.shape[1 - reduction]}"
    if ir.IntegerAttr(op.lanes).value < 1:
        return f"lanes is {op.lanes}, must be positive"
    tile = integers(op.tile)
    if not tile or min(tile) < 1:
        return f"tile {tile} is not a list of positive numbers"
    return epilogue_problem(op)


def _read_problem(op: Any) -> str | None:
    tensor, affine_map = ir.RankedTensorType(op.source.type), ir.AffineMapAttr(op.map).value
    if len(affine_map.results) != tensor.rank:
        return f"map {affine_map} does not fit {tensor}"
    if op.result.type != tensor.element_type:
        return f"gives {op.result.type}, its operand holds {tensor.element_type}"
    return None


class ContractOp(KernelOp, name="contract", traits=[ext.Pure]):
    """A contraction with its epilogue, on any encodings."""

    lhs: ext.Operand[Any]
    rhs: ext.Operand[Any]
    indexing_maps: ir.ArrayAttr
    outputs: Sequence[ext.Result[Any]]
    epilogue: ext.Region

    verify_region_invariants = verified(_contract_problem)

    @property
    def result(self) -> ir.Value:
        """The first result."""
        return self.operation.results[0]


class SpmmOp(KernelOp, name="spmm", traits=[ext.Pure]):
    """y[t, m] = epilogue(sum_k x[t, k] w[m, k]), scheduled."""

    x: ext.Operand[Any]
    w: ext.Operand[Any]
    schedule: ir.StringAttr
    tile: ir.ArrayAttr
    lanes: ir.IntegerAttr
    reduction: ir.IntegerAttr
    outputs: Sequence[ext.Result[Any]]
    epilogue: ext.Region

    verify_region_invariants = verified(_spmm_problem)

    @property
    def result(self) -> ir.Value:
        """The first result."""
        return self.operation.results[0]


class MapOp(KernelOp, name="map", traits=[ext.Pure]):
    """y[t, n] = body, element by element."""

    result: ext.Result[Any]
    body: ext.Region

    verify_region_invariants = verified(_body_problem)


class SumOp(KernelOp, name="sum", traits=[ext.Pure]):
    """y[t, 0] = the sum of body over n < size."""

    size: ir.IntegerAttr
    result: ext.Result[Any]
    body: ext.Region

    verify_region_invariants = verified(_sum_problem)


class MaxOp(KernelOp, name="max", traits=[ext.Pure]):
    """y[t, 0] = the maximum of body over n < size; NaN if one of them is."""

    size: ir.IntegerAttr
    result: ext.Result[Any]
    body: ext.Region

    verify_region_invariants = verified(_sum_problem)


class ReadOp(KernelOp, name="read", traits=[ext.Pure]):
    """The element of a tensor that `map` gives for the element of the result that the body computes."""

    source: ext.Operand[Any]
    map: ir.AffineMapAttr
    result: ext.Result[Any]

    verify_invariants = verified(_read_problem)


def _inner_problem(op: Any) -> str | None:
    x, w, reduction = (*map(ir.RankedTensorType, (op.x.type, op.w.type)), ir.IntegerAttr(op.reduction).value)
    if x.rank != 2 or w.rank != 2 or reduction not in (0, 1):
        return f"multiplies two matrices, one of whose dimensions is summed over, not {x} and {w}"
    if x.shape[1] != w.shape[reduction]:
        return f"sums over {x.shape[1]} columns, and over {w.shape[reduction]}"
    return None


class InnerOp(KernelOp, name="inner", traits=[ext.Pure]):
    """sum_k x[t, k] w[n, k], for the element [t, n] that the body computes. `reduction` is the dimension of w summed over."""

    x: ext.Operand[Any]
    w: ext.Operand[Any]
    reduction: ir.IntegerAttr
    result: ext.Result[Any]

    verify_invariants = verified(_inner_problem)


class YieldOp(KernelOp, name="yield", traits=[ir.IsTerminatorTrait]):
    """Ends a body, and gives the value that is stored into the result, or into each of several results."""

    values: Sequence[ext.Operand[Any]]


def end(*values: ir.Value) -> None:
    """Ends a body with these values."""
    ir.Operation.create("kernel.yield", operands=values)


def product(name: str, factors: Sequence[ir.Value], attributes: Mapping[str, ir.Attribute], types: Sequence[ir.Type]) -> Any:
    """Makes a kernel.contract or kernel.spmm with results of these types and an empty epilogue.

    It does not use the op's class, which would add an attribute with the number of results to each op.
    """
    return ir.Operation.create(f"kernel.{name}", results=types, operands=factors, attributes=dict(attributes), regions=1).opview
