"""Labels calls of regions in profiles, with the modules whose weights they take and the operations beside the products.

encoder.layer.0.attention.self.query to output.dense + softmax, gelu, layer_norm, chain of 6
"""

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from gossamer.backend.run.compiled_region import CompiledRegion
from gossamer.runtime.watching.names import name_of

_MOST = 4  # operations that a label names
_UNSAID = {
    "add", "sub", "mul", "div", "neg", "pow", "sum", "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "expand",
    "unsqueeze", "squeeze", "clone", "slice", "select", "getitem", "_to_copy", "full", "alias", "detach",
}  # fmt: skip
"""Arithmetic and changes of shapes. Labels do not name them, because decomposed functions consist of them."""


def about(kind: str, members: Sequence[fx.Node], products: Sequence[fx.Node]) -> str:
    """Returns the operations that the members of a region compute besides some products, then the kind of the region."""
    said = operations_of(members, unsaid=[_operation(node) for node in products])
    return ", ".join(each for each in (f"+ {said}" if said else "", kind) if each)


def operations_of(nodes: Sequence[fx.Node], unsaid: Sequence[str] = ()) -> str:
    """Returns the first few of the model's operations that nodes compute: "softmax, gelu, …"."""
    said = [name for name in dict.fromkeys(map(_operation, nodes)) if name and name not in _UNSAID and name not in unsaid]
    return ", ".join(said[:_MOST]) + ", …" * (len(said) > _MOST)


def _operation(node: fx.Node) -> str:
    """Returns the name of the model's operation that a node is, or that was decomposed into it."""
    target: Any = node.meta.get("original_aten") or node.target
    return (
        str(getattr(getattr(target, "overloadpacket", target), "__name__", ""))
        .lstrip("_")
        .removeprefix("native_")
        .removesuffix("_legit_no_training")
    )


def modules_of(region: object, operands: Sequence[Tensor]) -> list[str]:
    """Returns the modules whose weights a call takes, in the order of the operands."""
    leaves = list(operands)
    if isinstance(region, CompiledRegion) and region.weights:
        leaves = [leaf for weight in region.weights for leaf in operands[weight.statics]]
    names = (name_of(leaf) for leaf in leaves if leaf.dim() > 1 or leaf.numel() == 1)
    return list(dict.fromkeys(module_of(name) for name in names if name))


def module_of(name: str) -> str:
    """Returns the module of a parameter or mask. Returns the name unchanged if it is not a usual name of a weight."""
    return re.sub(r"\.(parametrizations\.weight\..*|weight(_orig|_mask)?)$", "", name)


def label(region: object, operands: Sequence[Tensor]) -> str:
    """Returns the label of a call."""
    modules = modules_of(region, operands)
    if not modules:
        sizes = ["x".join(map(str, each.shape)) for each in operands[:2]]
        named = f"region of {' and '.join(sizes)}"
    elif len(modules) == 1:
        named = modules[0]
    else:
        first, last = modules[0].split("."), modules[-1].split(".")
        shared = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
        named = ".".join(first[:shared]) + ": " * bool(shared) + f"{'.'.join(first[shared:])} to {'.'.join(last[shared:])}"
    said = str(getattr(region, "about", ""))
    return f"{named}{' ' if said.startswith(('+', '(')) else ', '}{said}" if said else named
