"""The element types of kernels, by their names in MLIR. A new one is one line here.

runtime/elements.py has the torch types for them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Element:
    """An element type.

    name   its name in MLIR
    torch  its name in torch
    bytes  bytes of an element
    sums   the type in which its products are summed
    """

    name: str
    torch: str
    bytes: int
    sums: str


FLOATS = {
    each.name: each
    for each in (
        Element("f32", "float32", 4, "f32"),
        Element("f64", "float64", 8, "f64"),
        Element("bf16", "bfloat16", 2, "f32"),
        Element("f16", "float16", 2, "f32"),
    )
}
WEIGHTS = {**FLOATS, "i8": Element("i8", "int8", 1, "i32")}
"""Element types of weights. Quantized ones are i8: their products are exact in i32."""
INTEGERS = {name: Element(name, f"int{name[1:]}", int(name[1:]) // 8, name) for name in ("i8", "i16", "i32", "i64")}
WIDE = tuple(each.name for each in FLOATS.values() if each.sums == each.name)
"""Floats that are summed in their own type."""
